"""mkd/cpu/attention.py: packed rows and context-parallel ranks against the definition of attention on one rank, output
and gradient of queries, keys and values.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mkd.cpu.attention import SegmentAttention
from mkd.distributed.context_parallel import dual_chunk_positions
from tests.support.dist.pool import Pool
from tests.support.tolerance import FP64, assert_close_norm

HEADS, GROUPS, WIDTH, ROW = 6, 2, 4, 32
ONE, SEVERAL = (0, ROW), (0, 8, 24, 24, 32)


def inputs(rows: int) -> list[Tensor]:
    """Query, key, value and the output's gradient: [s, b, heads, d] float64, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(ROW, rows, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def sink_values() -> Tensor:
    """[heads] float64."""
    return torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64)


def plain(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[int, ...], window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention inside each segment, a token and a head at a time; a sink is a score whose value is 0."""
    output = torch.zeros_like(query)
    for start, end in pairwise(bounds):
        for place in range(start, end):
            first = start if window is None else max(start, place - window)
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                seen = key[first : place + 1, :, group]
                scores = torch.einsum("bd,kbd->kb", query[place, :, head], seen) / WIDTH**0.5
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].expand(1, scores.shape[1])])
                weights = scores.softmax(0)[: len(seen)]
                output[place, :, head] = torch.einsum("kb,kbd->bd", weights, value[first : place + 1, :, group])
    return output


def module(size: int, **options: Any) -> SegmentAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=WIDTH,
        context_parallel_size=size,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        **options,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return SegmentAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def ours(rank: int, size: int, bounds: tuple[int, ...], is_packed: bool, options: dict[str, Any]) -> list[Tensor]:
    """Output and the three gradients of this rank's tokens, then the gradient of the sinks if there are any."""
    ps.initialize_model_parallel(context_parallel_size=size)
    model_parallel_cuda_manual_seed(1)
    try:
        places = dual_chunk_positions(bounds, rank, size)
        *qkv, upstream = (tensor[places] for tensor in inputs(1 if is_packed else 2))
        leaves = [tensor.clone().requires_grad_() for tensor in qkv]
        attention = module(size, **options)
        sinks = list(attention.parameters())
        for param in sinks:
            param.data = sink_values()
        if is_packed:
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
            packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=cu_seqlens)
            output = attention(*(leaf.squeeze(1) for leaf in leaves), None, packed_seq_params=packed)
            output = output.unsqueeze(1)
        else:
            output = attention(*leaves, None)
        assert output.shape == (len(places), upstream.shape[1], HEADS * WIDTH)
        output.backward(upstream.flatten(-2))
        return [output.detach(), *(leaf.grad for leaf in (*leaves, *sinks))]
    finally:
        ps.destroy_model_parallel()


@pytest.mark.parametrize(
    ("bounds", "is_packed"), [(ONE, False), (ONE, True), (SEVERAL, True)], ids=["rows", "one text", "several texts"]
)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 5])
def test_equals_plain_attention(
    gloo_pool: Callable[[int], Pool], size: int, bounds: tuple[int, ...], is_packed: bool, window: int | None
) -> None:
    options = {} if window is None else {"window_size": (window, 0)}
    *qkv, upstream = inputs(1 if is_packed else 2)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    output = plain(*leaves, bounds, window)
    output.backward(upstream)
    expected = [output.detach().flatten(-2), *(leaf.grad for leaf in leaves)]
    results = gloo_pool(size).run(ours, bounds, is_packed, options)
    order = torch.cat([dual_chunk_positions(bounds, rank, size) for rank in range(size)]).argsort()
    for name, value, *parts in zip(("output", "query", "key", "value"), expected, *results, strict=True):
        assert_close_norm(torch.cat(parts)[order], value, FP64, name)


@pytest.mark.parametrize(("bounds", "is_packed"), [(ONE, False), (SEVERAL, True)], ids=["rows", "several texts"])
@pytest.mark.parametrize("size", [1, 2])
def test_sinks_equal_plain_attention(
    gloo_pool: Callable[[int], Pool], size: int, bounds: tuple[int, ...], is_packed: bool
) -> None:
    *qkv, upstream = inputs(1 if is_packed else 2)
    leaves = [tensor.requires_grad_() for tensor in (*qkv, sink_values())]
    output = plain(*leaves[:3], bounds, 5, leaves[3])
    output.backward(upstream)
    results = gloo_pool(size).run(ours, bounds, is_packed, {"window_size": (5, 0), "softmax_type": "learnable"})
    order = torch.cat([dual_chunk_positions(bounds, rank, size) for rank in range(size)]).argsort()
    expected = [output.detach().flatten(-2), *(leaf.grad for leaf in leaves)]
    *tokens, sinks = zip(*results, strict=True)
    for name, value, parts in zip(("output", "query", "key", "value"), expected, tokens, strict=False):
        assert_close_norm(torch.cat(parts)[order], value, FP64, name)
    assert_close_norm(sum(sinks), expected[4], FP64, "sinks")
