"""Attributes of modules in forward passes over one token per text."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from mkd.rollout.token_layout import TokenLayout


class Layer(torch.nn.Module):
    def __init__(self, config: Namespace) -> None:
        super().__init__()
        self.config = config
        self.sequence_parallel, self._sequence_parallel, self.reduce_scatter_embeddings = True, True, False


def model(**changes: Any) -> torch.nn.ModuleList:
    config = Namespace(**dict(sequence_parallel=True, num_moe_experts=None, tp_comm_overlap=False) | changes)
    chunk = torch.nn.ModuleList([Layer(config), Layer(config)])
    chunk.config = config
    return chunk


def attributes(chunk: torch.nn.ModuleList) -> list[dict[str, Any]]:
    own = ("sequence_parallel", "_sequence_parallel", "reduce_scatter_embeddings")
    return [{name: getattr(layer, name) for name in own} for layer in chunk] + [dict(vars(chunk.config))]


def test_changes_end_with_an_error() -> None:
    """Sequence parallelism is off."""
    chunk = model()
    before = attributes(chunk)
    layout = TokenLayout.of([chunk], Namespace(tp=Namespace(size=lambda: 2)))
    assert attributes(chunk) == before
    with pytest.raises(ZeroDivisionError), layout.active():
        first, second, config = attributes(chunk)
        assert first == before[0] | {"sequence_parallel": False, "_sequence_parallel": False}
        assert second == before[1] | {"sequence_parallel": False, "_sequence_parallel": False}
        assert config == before[2] | {"sequence_parallel": False}
        raise ZeroDivisionError
    assert attributes(chunk) == before


@pytest.mark.parametrize(("size", "changes"), [(2, {"num_moe_experts": 4}), (2, {"tp_comm_overlap": True}), (1, {})])
def test_layouts_that_stay(size: int, changes: dict[str, Any]) -> None:
    """Experts, overlapped communication, and one rank."""
    assert TokenLayout.of([model(**changes)], Namespace(tp=Namespace(size=lambda: size))).changes == ()
