"""Flags of packages and kernels that are missing."""

from argparse import Namespace

import pytest
from megatron.core.transformer.enums import AttnBackend

from mkd.config.megatron.checks.parts import check_parts
from mkd.errors import MkdConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": AttnBackend.local}, "--attention-backend local is not supported"),
        ({"fault_injector_num_ranks": 7}, "--fault-injector-num-ranks need the package nvidia-resiliency-ext"),
        ({"fault_injector_ranks": [0]}, "--fault-injector-ranks and"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "works only with --fp8-param-gather"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant needs Transformer Engine"),
        ({"use_te_activation_func": True}, "--use-te-activation-func needs Transformer Engine"),
    ],
)
def test_parts_that_are_missing_are_refused(
    changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron raises an assertion when it builds the models, or later."""
    monkeypatch.setattr("mkd.config.megatron.checks.parts.find_spec", lambda name: None)
    args = Namespace(transformer_impl="local", fp8_param_gather=False, attention_backend=AttnBackend.auto)
    check_parts(args)
    check_parts(Namespace(**vars(args), experimental_attention_variant="gated_delta_net"))
    with pytest.raises(MkdConfigError, match=message):
        check_parts(Namespace(**{**vars(args), **changes}))
