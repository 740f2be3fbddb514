"""Attributes of modules in forward passes over one token per text."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from mkd.distributed.peer_memory import NoPeerMemory
from mkd.rollout.engine import token_layout
from mkd.rollout.engine.token_layout import TokenLayout


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


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where passes are no CUDA graphs."""
    monkeypatch.setattr(token_layout, "can_capture", lambda *_: False)


def attributes(chunk: torch.nn.ModuleList) -> list[dict[str, Any]]:
    own = ("sequence_parallel", "_sequence_parallel", "reduce_scatter_embeddings")
    return [{name: getattr(layer, name) for name in own} for layer in chunk] + [dict(vars(chunk.config))]


def test_changes_end_with_an_error() -> None:
    """Sequence parallelism is off."""
    chunk = model()
    before = attributes(chunk)
    layout = TokenLayout.of([chunk], Namespace(tp=Namespace(size=lambda: 2)), 4)
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
    assert TokenLayout.of([model(**changes)], Namespace(tp=Namespace(size=lambda: size)), 4).changes == ()


@pytest.mark.parametrize(
    ("size", "slots", "reason", "expected"),
    [
        (1, 4, "layers have biases", ""),
        (2, 4, "layers have biases", "layers have biases"),
        (2, 512, None, "no access"),
        (2, 513, None, "513 texts at once, of 2048 values"),
        (4, 4, None, "4 ranks"),
    ],
)
def test_sums_through_nccl(
    monkeypatch: pytest.MonkeyPatch, size: int, slots: int, reason: str | None, expected: str
) -> None:
    """The reason is in the log once, and on one rank nowhere."""

    lines: list[str] = []

    def no_memory(*unused: Any) -> None:
        raise NoPeerMemory("no access")

    monkeypatch.setattr(token_layout, "can_capture", lambda *_: True)
    monkeypatch.setattr(token_layout, "reason_against_block_sums", lambda _: reason)
    monkeypatch.setattr(token_layout, "peer_memory", no_memory)
    monkeypatch.setattr(token_layout.logger, "info", lambda line, *values: lines.append(line % values))
    token_layout._report.cache_clear()
    chunk = model(hidden_size=2048, params_dtype=torch.bfloat16)
    changes = [TokenLayout.of([chunk], Namespace(tp=Namespace(size=lambda: size)), slots).changes for _ in range(2)]
    assert changes[0] == changes[1] and all(value is False for _, _, value in changes[0])
    assert [line.rpartition(": ")[2] for line in lines] == ([expected] if expected else [])


def test_wide_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs would not be on the GPU at once."""
    monkeypatch.setattr(token_layout, "can_capture", lambda *_: True)
    monkeypatch.setattr(token_layout, "reason_against_block_sums", lambda _: None)
    monkeypatch.setattr(token_layout, "peer_memory", lambda *_: pytest.fail("the output is too wide"))
    TokenLayout.of([model(hidden_size=8192, params_dtype=torch.bfloat16)], Namespace(tp=Namespace(size=lambda: 2)), 129)
