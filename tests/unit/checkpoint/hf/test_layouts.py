"""Layouts of Hugging Face tensors inside Megatron parameters, against row-by-row definitions."""

import pytest
import torch

from mkd.checkpoint.hf.layouts import ATTENTION_OUTPUT, DOWN, GATE_UP, QKV, VOCAB, Dims, TensorShard, gated_qkv
from mkd.errors import MkdCheckpointError

DIMS = Dims(hidden=5, ffn=12, heads=8, groups=4, head_dim=3, vocab=13)


def reads_of(*tensors):
    return [
        lambda rows, cols, t=t: t[rows or slice(None)] if cols is None else t[rows or slice(None), cols]
        for t in tensors
    ]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def shards_of(layout, tensors, size, shape):
    return [layout.shard(reads_of(*tensors), DIMS, TensorShard(rank, size), shape) for rank in range(size)]


def qkv_rows():
    """(q, k, v, linear_qkv); linear_qkv holds query heads, key head and value head of one group after the other."""
    q, k, v = random(24, 5), random(12, 5), random(12, 5) + 1
    rows = []
    for group in range(4):
        for head in (2 * group, 2 * group + 1):
            rows += [q[3 * head + i] for i in range(3)]
        rows += [k[3 * group + i] for i in range(3)]
        rows += [v[3 * group + i] for i in range(3)]
    return q, k, v, torch.stack(rows)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16], ids="tp{}".format)
def test_qkv(size):
    q, k, v, whole = qkv_rows()
    shards = shards_of(QKV, (q, k, v), size, (48 // size, 5))
    assert torch.equal(torch.cat(shards), whole)


def test_qkv_split():
    q, k, v, whole = qkv_rows()
    for part, expected in zip(QKV.split(whole, DIMS), (q, k, v), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("size", [1, 2, 4, 8], ids="tp{}".format)
def test_gated_qkv(size):
    """Queries and gates are apart in Megatron's matrix, and alternate by heads in the folder's."""
    queries, k, v, _ = qkv_rows()
    gates = queries + 2
    heads = [torch.cat([queries[3 * head : 3 * head + 3], gates[3 * head : 3 * head + 3]]) for head in range(8)]
    q = torch.cat(heads)
    whole = torch.cat(
        [
            torch.cat([queries[6 * group :][:6], gates[6 * group :][:6], k[3 * group :][:3], v[3 * group :][:3]])
            for group in range(4)
        ]
    )
    assert torch.equal(torch.cat(shards_of(gated_qkv(), (q, k, v), size, (72 // size, 5))), whole)
    for part, expected in zip(gated_qkv().split(whole, DIMS), (q, k, v), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("size", [1, 2, 3], ids="tp{}".format)
def test_gate_up(size):
    gate, up = random(12, 5), random(12, 5) + 1
    shards = shards_of(GATE_UP, (gate, up), size, (24 // size, 5))
    for rank, shard in enumerate(shards):
        rows = slice(rank * 12 // size, (rank + 1) * 12 // size)
        assert torch.equal(shard, torch.cat([gate[rows], up[rows]]))
    parts = GATE_UP.split(torch.cat([gate, up]), DIMS)
    assert torch.equal(parts[0], gate) and torch.equal(parts[1], up)


@pytest.mark.parametrize(("layout", "width"), [(ATTENTION_OUTPUT, 24), (DOWN, 12)])
def test_row_parallel(layout, width):
    whole = random(5, width)
    shards = shards_of(layout, (whole,), 4, (5, width // 4))
    assert torch.equal(torch.cat(shards, dim=1), whole)


@pytest.mark.parametrize(("size", "rows"), [(1, 13), (1, 16), (2, 8), (4, 8)])
def test_vocabulary_is_padded_with_zeros(size, rows):
    whole = random(13, 5)
    padded = torch.cat(shards_of(VOCAB, (whole,), size, (rows, 5)))
    assert padded.shape == (size * rows, 5)
    assert torch.equal(padded[:13], whole)
    assert padded[13:].count_nonzero() == 0
    assert torch.equal(VOCAB.split(padded, DIMS)[0], whole)


def test_too_small_vocabulary_is_refused():
    with pytest.raises(MkdCheckpointError, match=r"12 vocabulary rows.*13.*--vocab-size"):
        shards_of(VOCAB, (random(13, 5),), 2, (6, 5))
