"""Adapters on one linear layer: what the hook reads, and the initial factors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import Tensor, nn

from mkd.checkpoint.ranks import one_rank
from mkd.config.lora import LoraOptions
from mkd.models.adapted_layers import AdaptedLinear, RowPart, initial_a
from mkd.models.lora import LinearAdapters, _hook, store_trained_only


class OneRank:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def adapters_of_two(scale: float = 1.0) -> LinearAdapters:
    """Adapters of two Hugging Face layers in blocks of rows q, q, k, v, of which k has none."""
    parts = (RowPart(8, "q_proj"), RowPart(4, None), RowPart(4, "v_proj"))
    linear = AdaptedLinear(0, "self_attention.linear_qkv", 6, parts, groups=2)
    config = SimpleNamespace(sequence_parallel=False, params_dtype=torch.float32)
    adapters = LinearAdapters(linear, LoraOptions(2, 2 * scale), config, OneRank(), seed=1)
    for parameter in adapters.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(parameter)))
    return adapters


def test_rows_of_a_query_group() -> None:
    adapters, x = adapters_of_two(scale=3.0), torch.randn(5, 1, 6)
    q = 3.0 * x @ adapters.A0.T @ adapters.B0.T
    v = 3.0 * x @ adapters.A1.T @ adapters.B2.T
    k = torch.zeros(5, 1, 2)
    expected = torch.cat([q[..., :4], k, v[..., :2], q[..., 4:], k, v[..., 2:]], dim=-1)
    assert torch.allclose(adapters(x), expected, atol=1e-5)


class Linear(nn.Module):
    """A linear layer that returns what Megatron's do; Transformer Engine's with a norm can return its output, too."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        if form != "plain":
            self.return_layernorm_output = False

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        output, bias, normalized = x.new_zeros(5, 1, 16), torch.ones(16), x * 2
        if self.form == "plain":
            return output, bias
        assert self.return_layernorm_output
        return (output, bias, normalized) if self.form == "norm and bias" else ((output, normalized), None)


@pytest.mark.parametrize(("form", "factor"), [("plain", 1), ("norm", 2), ("norm and bias", 2)])
def test_adapters_read_the_normalized_input(form: str, factor: int) -> None:
    linear, adapters, x = Linear(form), adapters_of_two(), torch.randn(5, 1, 6)
    _hook(linear, adapters)
    output, bias = linear(x)
    assert torch.equal(output, adapters(factor * x))
    assert (bias is None) == (form == "norm")


def test_adapters_come_before_other_hooks() -> None:
    linear, adapters, x = Linear("plain"), adapters_of_two(), torch.randn(5, 1, 6)
    linear.register_forward_hook(lambda module, inputs, output: (output[0] * 0.5, output[1]))
    _hook(linear, adapters)
    assert torch.equal(linear(x)[0], 0.5 * adapters(x))


def test_initial_factors() -> None:
    a = initial_a("q_proj", 16, 400, seed=3)
    assert a.abs().max() <= 400**-0.5 < a.abs().max() * 1.01
    assert a.std() == pytest.approx(400**-0.5 / 3**0.5, rel=0.03)
    assert torch.equal(a, initial_a("q_proj", 16, 400, seed=3))
    assert not torch.equal(a, initial_a("k_proj", 16, 400, seed=3))
    assert not torch.equal(a, initial_a("q_proj", 16, 400, seed=4))


class Stage(nn.Module):
    """A model chunk with a frozen weight and, if it has any, an adapter."""

    def __init__(self, adapter: float | None = None) -> None:
        super().__init__()
        self.decoder = nn.Linear(2, 2)
        if adapter is not None:
            self.kd_lora = nn.ParameterDict({"q_proj": nn.Parameter(torch.full((2,), adapter))})

    def sharded_state_dict(self) -> ShardedStateDict:
        return {name: ShardedTensor.from_rank_offsets(name, value) for name, value in self.state_dict().items()}


def test_checkpoint_of_a_stage_without_adapters(tmp_path: Path) -> None:
    first, last, resumed = Stage(adapter=1.0), Stage(), Stage(adapter=2.0)
    for chunk in (first, last, resumed):
        store_trained_only(chunk)
    states = {"model": first.sharded_state_dict(), "model1": last.sharded_state_dict()}
    with one_rank():
        dist_checkpointing.save(states, str(tmp_path))
        assert dist_checkpointing.load_tensors_metadata(str(tmp_path)).keys() == {"kd_lora.q_proj"}
        for chunk in (last, resumed):
            loaded = dist_checkpointing.load({"model": chunk.sharded_state_dict()}, str(tmp_path))
            before = chunk.decoder.weight.clone()
            chunk.load_state_dict(loaded["model"], strict=True)
            assert torch.equal(chunk.decoder.weight, before)
    assert torch.equal(resumed.kd_lora["q_proj"], torch.ones(2))
    with pytest.raises(RuntimeError, match="other"):
        last.load_state_dict({"other": torch.ones(1)}, strict=True)
