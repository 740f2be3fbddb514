"""mkd/compat/optimizer.py, and that megatron-core 0.19 needs it. Rates: tests/unit/checkpoint/test_lr_schedule.py."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mkd.compat.optimizer import resume_distributed_optimizer
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
