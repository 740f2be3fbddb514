"""Attributes of modules in forward passes over one token per text."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from mkd.rollout.token_layout import TokenLayout


class Layer(torch.nn.Module):
    def __init__(self, config: Namespace, group: Any) -> None:
        super().__init__()
        self.config, self.tp_group, self.other_group = config, group, object()
        self.sequence_parallel, self._sequence_parallel, self.reduce_scatter_embeddings = True, True, False


def model(group: Any, **changes: Any) -> torch.nn.ModuleList:
    values = dict(sequence_parallel=True, num_moe_experts=None, tp_comm_overlap=False, hidden_size=8)
    config = Namespace(**values | changes)
    chunk = torch.nn.ModuleList([Layer(config, group), Layer(config, object())])
    chunk.config = config
    return chunk


def attributes(chunk: torch.nn.ModuleList) -> list[dict[str, Any]]:
    own = ("tp_group", "other_group", "sequence_parallel", "_sequence_parallel", "reduce_scatter_embeddings")
    return [{name: getattr(layer, name) for name in own} for layer in chunk] + [dict(vars(chunk.config))]


def test_changes_end_with_an_error() -> None:
    """Sequence parallelism is off."""
    group = Namespace(size=lambda: 2)
    chunk = model(group)
    before = attributes(chunk)
    layout = TokenLayout.of([chunk], Namespace(tp=group))
    assert attributes(chunk) == before
    with pytest.raises(ZeroDivisionError), layout.active():
        first, second, config = attributes(chunk)
        assert first == before[0] | {"sequence_parallel": False, "_sequence_parallel": False}
        assert second == before[1] | {"sequence_parallel": False, "_sequence_parallel": False}
        assert config == before[2] | {"sequence_parallel": False}
        raise ZeroDivisionError
    assert attributes(chunk) == before


@pytest.mark.parametrize("changes", [{"num_moe_experts": 4}, {"tp_comm_overlap": True}, {"size": 1}])
def test_layouts_that_stay(changes: dict[str, Any]) -> None:
    """Experts, overlapped communication, and one rank."""
    group = Namespace(size=lambda: changes.get("size", 2))
    assert TokenLayout.of([model(group, **changes)], Namespace(tp=group)).changes == ()
