"""Optimizers of missing packages, and flags that contradict them."""

from argparse import Namespace

import pytest

from mkd.config.megatron.checks.optimizer import check_optimizer
from mkd.errors import MkdConfigError

DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def optimizer(name: str, **changes: bool | str) -> Namespace:
    options = {"use_distributed_optimizer": False, "use_precision_aware_optimizer": False}
    return Namespace(optimizer=name, **{**options, **dict.fromkeys(DTYPES, "fp32"), **changes})


def test_an_optimizer_of_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkd.config.megatron.checks.optimizer.find_spec", lambda name: None)
    for name in ("adam", "sgd"):
        check_optimizer(optimizer(name))
    with pytest.raises(MkdConfigError, match="--optimizer lion needs the package emerging-optimizers"):
        check_optimizer(optimizer("lion"))


def test_optimizers_that_cannot_be_distributed() -> None:
    check_optimizer(optimizer("adam", use_distributed_optimizer=True, use_precision_aware_optimizer=True))
    with pytest.raises(MkdConfigError, match="--optimizer sgd does not work with --use-distributed-optimizer"):
        check_optimizer(optimizer("sgd", use_distributed_optimizer=True))
    with pytest.raises(MkdConfigError, match="--use-precision-aware-optimizer needs --use-distributed-optimizer"):
        check_optimizer(optimizer("adam", use_precision_aware_optimizer=True))


@pytest.mark.parametrize("name", DTYPES)
def test_precisions_of_the_precision_aware_optimizer(name: str) -> None:
    with pytest.raises(MkdConfigError, match=f"--{name.replace('_', '-')} bf16 needs --use-precision-aware-optimizer"):
        check_optimizer(optimizer("adam", **{name: "bf16"}))
    both = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    check_optimizer(optimizer("adam", **both, **{name: "bf16"}))
