"""mkd/compat/optimizer.py, and that megatron-core 0.19 needs it.

Rates: tests/unit/checkpoint/megatron/test_lr_schedule.py.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from mkd.compat.optimizer import resume_distributed_optimizer, resume_experts_on_other_ranks
from tests.support.upstream import fresh


class InnerOptimizer:
    """Stand-in for PyTorch's optimizer inside a distributed one."""

    def __init__(self) -> None:
        self.state: dict = {}


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], DistributedOptimizer]:
    """Makes distributed optimizers without a model, with stand-ins for upstream's two functions."""

    def state_dict(self: DistributedOptimizer) -> list:
        return [state["step"].item() for state in self.optimizer.state.values()]

    def load_state_dict(self: DistributedOptimizer, state: dict) -> None:
        step = torch.tensor(3.0)
        self.optimizer.state = {name: {"step": step} for name in "ab"}

    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    monkeypatch.setattr(DistributedOptimizer, "state_dict", state_dict)
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", load_state_dict)
    whole = DistributedOptimizer._set_main_param_and_optimizer_states
    monkeypatch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", whole)
    resume_distributed_optimizer()

    def make() -> DistributedOptimizer:
        made = object.__new__(DistributedOptimizer)
        made.optimizer = InnerOptimizer()
        return made

    return make


def test_distributed_optimizer_without_a_step_has_a_state(distributed: Callable[[], DistributedOptimizer]) -> None:
    made = distributed()
    assert made.state_dict() == [0.0]
    assert made.optimizer.state == {}
    made.optimizer.state = {"a": {"step": torch.tensor(5.0)}}
    assert made.state_dict() == [5.0]


def test_distributed_optimizer_counts_the_steps_of_each_parameter(
    distributed: Callable[[], DistributedOptimizer],
) -> None:
    made = distributed()
    made.load_state_dict({})
    made.optimizer.state["a"]["step"] += 1
    assert made.state_dict() == [4.0, 3.0]


def test_fp32_weights_and_steps_in_the_form_that_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream writes into a view of a weight that autograd watches, and has 0 steps there."""
    for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states"):
        monkeypatch.setattr(DistributedOptimizer, name, getattr(fresh(distrib_optimizer).DistributedOptimizer, name))
    weight = torch.nn.Parameter(torch.zeros(4))
    view, step = weight.view(-1), torch.tensor(3.0)
    stand_in = SimpleNamespace(
        model_param_group_index_map={weight: (0, 0)},
        optimizer=SimpleNamespace(param_groups=[{"params": [view]}], state={view: {"step": step}}),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
    )
    load = (stand_in, weight, {"param": torch.ones(4), "step": torch.tensor(0.0)})
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        DistributedOptimizer._set_main_param_and_optimizer_states(*load)
    resume_distributed_optimizer()
    DistributedOptimizer._set_main_param_and_optimizer_states(*load)
    assert weight.tolist() == [1.0] * 4
    assert step == 3.0


def test_upstream_asserts_on_an_optimizer_without_a_step_and_shares_the_number() -> None:
    source = inspect.getsource(distrib_optimizer)
    assert 'steps = list(set([s["step"].item() for s in inner_state_dict["state"].values()]))' in source
    assert 's["step"] = step\n' in source
    assert "if not isinstance(tensors[key], torch.Tensor):" in source


DENSE, PLAIN, EXPERTS = (
    {"wd_mult": decay, "is_expert_parallel": is_expert}
    for decay, is_expert in ((1.0, False), (0.0, False), (1.0, True))
)


class OneOptimizer:
    """Stand-in for one of the chained optimizers, with parameter groups; keeps the state that it loads."""

    def __init__(self, *groups: dict) -> None:
        numbered = [{**group, "params": [number]} for number, group in enumerate(groups)]
        self.optimizer = SimpleNamespace(state_dict=lambda: {"param_groups": numbered}, param_groups=numbered)

    def load_state_dict(self, state: dict) -> None:
        self.loaded = state


def loaded(state: Any, *optimizers: OneOptimizer) -> list[dict]:
    chain = object.__new__(ChainedOptimizer)
    chain.chained_optimizers = list(optimizers)
    chain.load_state_dict(state)
    return [one.loaded for one in optimizers]


def of_format(fp32: bool, groups: list[dict], **tensors: Any) -> dict:
    """An optimizer's state; that of fp32 weights has PyTorch's part at the top."""
    inner = {"param_groups": [{**group, "params": [7], "step": 3} for group in groups]}
    return {**inner, **tensors} if fp32 else {"optimizer": inner, **tensors}


@pytest.mark.parametrize("fp32", [False, True])
def test_experts_on_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch, fp32: bool) -> None:
    """Common values are as in the checkpoint, tensors where the job requested them."""
    monkeypatch.setattr(ChainedOptimizer, "load_state_dict", fresh(optimizer).ChainedOptimizer.load_state_dict)
    monkeypatch.setattr(ChainedOptimizer, "_synchronize_steps", lambda self: None)
    whole, dense, experts = OneOptimizer(DENSE, PLAIN), OneOptimizer(DENSE, PLAIN), OneOptimizer(EXPERTS)
    apart = {0: of_format(fp32, [DENSE, PLAIN], scale=2), 1: of_format(fp32, [EXPERTS], scale=2), "param_state": "t"}
    together = {**of_format(fp32, [DENSE, PLAIN], scale=2), 0: {"param_state": "t0"}, 1: {"param_state": "t1"}}
    (kept,) = loaded(apart, whole)
    assert ("optimizer" not in kept) or fp32, "upstream joins the states itself"
    with pytest.raises(RuntimeError, match="Expected 2 entries"):
        loaded(together, dense, experts)
    resume_experts_on_other_ranks()

    def numbered(*groups: dict) -> list[dict]:
        return [{**group, "params": [number], "step": 3} for number, group in enumerate(groups)]

    def parts(state: dict) -> tuple:
        return state.get("optimizer", state)["param_groups"], state["param_state"], state["scale"]

    (joined,) = loaded(apart, whole)
    assert parts(joined) == (numbered(DENSE, PLAIN), "t", 2)
    first, second = loaded(together, dense, experts)
    assert parts(first) == (numbered(DENSE, PLAIN), "t0", 2)
    assert parts(second) == (numbered(EXPERTS), "t1", 2)
    same = {0: of_format(fp32, [DENSE, PLAIN]), 1: of_format(fp32, [EXPERTS])}
    assert loaded(same, dense, experts) == [same[0], same[1]]
    assert loaded(kept := of_format(fp32, [DENSE, PLAIN]), whole) == [kept]
