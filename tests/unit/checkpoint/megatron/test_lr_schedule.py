"""Schedules of a checkpoint and of a job: comparison, and the rates that the optimizer uses after a resume."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import training

from mkd.checkpoint.megatron.lr_schedule import check_schedule
from mkd.compat.optimizer import use_own_learning_rates
from mkd.errors import MkdConfigError
from tests.support.upstream import fresh

ITERATIONS: dict[str, Any] = dict(train_iters=4, train_samples=None)
SAMPLES: dict[str, Any] = dict(train_iters=None, train_samples=24, lr_warmup_samples=3)


def arguments(**changes: Any) -> Namespace:
    given = dict(
        **dict(global_batch_size=4, lr=1e-3, min_lr=1e-5, lr_warmup_init=0.0, lr_decay_style="cosine"),
        **dict(lr_decay_iters=None, lr_decay_samples=None, lr_wsd_decay_iters=None, lr_wsd_decay_samples=None),
        **dict(lr_warmup_iters=0, lr_warmup_samples=0, lr_warmup_fraction=None, lr_wsd_decay_style="exponential"),
        **dict(start_weight_decay=0.1, end_weight_decay=0.1, weight_decay_incr_style="constant"),
        **dict(override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False),
    )
    return Namespace(**{**given, **ITERATIONS, **changes})


def scheduler(monkeypatch: pytest.MonkeyPatch, args: Namespace) -> OptimizerParamScheduler:
    """Megatron's scheduler for these arguments."""
    monkeypatch.setattr(training, "get_args", lambda: Namespace(**vars(args)))
    monkeypatch.setattr(training, "update_train_iters", lambda args: None)
    return training.get_optimizer_param_scheduler(Namespace(param_groups=[]))


CHANGES = [
    ({}, {"lr": 2e-3}, "--lr is 0.001 there and 0.002 in this job"),
    ({}, {"min_lr": 0.0}, "--min-lr is 1e-05 there and 0.0 in this job"),
    ({}, {"train_iters": 8}, "--train-iters is 4 there and 8 in this job"),
    ({"lr_decay_iters": 4}, {"lr_decay_iters": 6}, "--lr-decay-iters is 4 there and 6 in this job"),
    ({}, {"lr_warmup_iters": 1}, "--lr-warmup-iters is 0 there and 1 in this job"),
    ({}, {"lr_warmup_fraction": 0.25}, "--lr-warmup-fraction is 0 samples there and 4 in this job"),
    ({}, {"lr_decay_style": "linear"}, "--lr-decay-style is cosine there and linear in this job"),
    (
        {},
        {"start_weight_decay": 0.0, "end_weight_decay": 0.0},
        "--weight-decay is 0.1 there and 0.0 in this job",
    ),
    ({}, {"weight_decay_incr_style": "linear"}, "--weight-decay-incr-style is constant there and linear in this job"),
    (
        {},
        {"global_batch_size": 8},
        "--train-iters is 4 * --global-batch-size 4 there and 4 * --global-batch-size 8 in this job",
    ),
    (SAMPLES, {"train_samples": 48}, "--train-samples is 24 there and 48 in this job"),
    (SAMPLES, {"lr_warmup_samples": 4}, "--lr-warmup-samples is 3 there and 4 in this job"),
]


@pytest.mark.parametrize(("common", "change", "words"), CHANGES, ids=lambda value: str(value)[:40])
def test_differences_are_refused_before_megatron_asserts(
    monkeypatch: pytest.MonkeyPatch, common: dict, change: dict, words: str
) -> None:
    stored, args = arguments(**common), arguments(**{**common, **change})
    state = scheduler(monkeypatch, stored).state_dict()
    assert check_schedule(stored, stored, state, "--load X") == []
    scheduler(monkeypatch, stored).load_state_dict(state)
    with pytest.raises(AssertionError, match="do not match"):
        scheduler(monkeypatch, args).load_state_dict(state)
    with pytest.raises(MkdConfigError) as caught:
        check_schedule(args, stored, state, "--load X")
    assert str(caught.value).startswith(f"--load X was trained with another schedule: {words}. Give --override-opt")


def test_longer_run_with_constant_values_is_the_same_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = {"lr_decay_style": "constant", "lr_warmup_iters": 1}
    for common in (constant, {"lr_decay_iters": 4}):
        stored, args = arguments(**common), arguments(**common, train_iters=8)
        state = scheduler(monkeypatch, stored).state_dict()
        with pytest.raises(AssertionError, match="do not match"):
            scheduler(monkeypatch, args).load_state_dict(state)
        assert check_schedule(args, stored, state, "--load X") == []
        scheduler(monkeypatch, args).load_state_dict(state)
    rising = {"weight_decay_incr_style": "linear", "lr_decay_iters": 4}
    stored, args = arguments(**rising), arguments(**rising, train_iters=8)
    with pytest.raises(MkdConfigError, match="--train-iters is 4 there and 8"):
        check_schedule(args, stored, scheduler(monkeypatch, stored).state_dict(), "--load X")


def test_flags_select_one_of_the_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = arguments()
    state = scheduler(monkeypatch, stored).state_dict()
    own = arguments(lr=2e-3, train_iters=8, override_opt_param_scheduler=True)
    (note,) = check_schedule(own, stored, state, "--load X")
    assert note.startswith("the schedule is this command's: --lr is 0.001 there") and own.lr == 2e-3
    old = arguments(lr=2e-3, min_lr=0.0, train_iters=8, use_checkpoint_opt_param_scheduler=True)
    (note,) = check_schedule(old, stored, state, "--load X")
    assert note.startswith("the schedule is the checkpoint's: ") and (old.lr, old.min_lr) == (1e-3, 1e-5)


def group(lr: float, min_lr: float = 0.0, **others: Any) -> dict[str, Any]:
    return {"max_lr": lr, "min_lr": min_lr, "wd_mult": 1.0, "default_config": True, "params": [0], **others}


@pytest.fixture
def own_rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict], list[dict]], list[list[dict]]]:
    """(groups of this job, groups in the checkpoint) -> groups after loading, for both kinds of optimizer."""
    whole, distributed = optimizer.MegatronOptimizer, distrib_optimizer.DistributedOptimizer
    loaded: list[dict] = []
    reorder = staticmethod(whole._filter_and_reorder_param_groups)
    monkeypatch.setattr(whole, "_filter_and_reorder_param_groups", reorder)
    load = lambda self, state: loaded.append(state["optimizer"]["param_groups"])  # noqa: E731
    monkeypatch.setattr(distributed, "load_state_dict", load)
    use_own_learning_rates()

    def groups(current: list[dict], stored: list[dict]) -> list[list[dict]]:
        made = object.__new__(distributed)
        made.optimizer = Namespace(param_groups=current)
        made.load_state_dict({"optimizer": {"param_groups": stored}})
        return [whole._filter_and_reorder_param_groups(current, stored), loaded[-1]]

    return groups


def test_optimizer_uses_the_rates_of_this_job(own_rates: Callable) -> None:
    decoupled = {"default_config": False}
    now = [group(2e-3, 1e-4), group(2e-3, 1e-4, wd_mult=0.0), group(5e-3, 1e-4, **decoupled)]
    before = [group(1e-3, step=7), group(1e-3, step=7, wd_mult=0.0), group(9e-3, step=7, **decoupled)]
    for groups in own_rates(now, before):
        assert groups == [{**own, "step": 7} for own in now]
    with pytest.raises(ValueError, match="Could not find parameter group"):
        own_rates(now, [*before, group(3e-3)])  # two rates for one kind of group


def test_upstream_still_fails_with_another_rate() -> None:
    reorder = fresh(optimizer).MegatronOptimizer._filter_and_reorder_param_groups
    with pytest.raises(ValueError, match="Could not find parameter group"):
        reorder([group(2e-3)], [group(1e-3)])
    source = inspect.getsource(distrib_optimizer.DistributedOptimizer)
    assert "param_groups_map[needed_groups]" in source and "for key in param_group_identifier_keys" in source
