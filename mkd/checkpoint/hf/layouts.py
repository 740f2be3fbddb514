"""Layouts: the order of rows and columns of Hugging Face tensors inside one Megatron parameter, in both directions.

`Layout.shard` assembles this rank's shard of a Megatron parameter from Hugging Face tensors and reads only the bytes
that it needs. `Layout.split` splits a full parameter, as a torch_dist checkpoint stores it, into Hugging Face tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.errors import MkdCheckpointError


@dataclass(frozen=True)
class Dims:
    """Model sizes, by the names that the tensor tables use."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    query_latent: int = 0
    key_latent: int = 0
    positions: int = 0
    """Channels of a latent attention's key with rope."""
    plain_width: int = 0
    """Channels of a latent attention's key without rope."""

    delta_key_heads: int = 0
    """Heads of a gated delta net's queries, and of its keys."""
    delta_value_heads: int = 0
    delta_key_width: int = 0
    """Width of a head of its queries and keys."""
    delta_value_width: int = 0
    taps: int = 0
    """Tokens of its convolution, or of a Mamba layer's."""
    mamba_heads: int = 0
    mamba_inner: int = 0
    """Channels of all heads of a Mamba layer."""
    mamba_states: int = 0
    """Channels of the keys of all its groups, and of their queries (B and C)."""

    one: int = 1

    @property
    def query(self) -> int:
        """Rows of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Rows of the keys, or of the values, of all query groups."""
        return self.groups * self.head_dim

    @property
    def gated_query(self) -> int:
        """Queries with a gate of the same width for each head."""
        return 2 * self.query

    @property
    def delta_key(self) -> int:
        """Rows of the keys, or of the queries, of a gated delta net."""
        return self.delta_key_heads * self.delta_key_width

    @property
    def delta_value(self) -> int:
        """Rows of the values, or of the gates, of a gated delta net."""
        return self.delta_value_heads * self.delta_value_width

    @property
    def delta_query_key_value(self) -> int:
        return 2 * self.delta_key + self.delta_value

    @property
    def delta_query_key_value_gate(self) -> int:
        return 2 * self.delta_key + 2 * self.delta_value

    @property
    def delta_rates(self) -> int:
        """Rates of writing and of decay for each value head."""
        return 2 * self.delta_value_heads

    @property
    def mamba_convolved(self) -> int:
        """Channels of the convolution: inner ones, B and C."""
        return self.mamba_inner + 2 * self.mamba_states

    @property
    def mamba_projected(self) -> int:
        """Rows of the input projection: gates, inner channels, B, C, and the time step of each head."""
        return 2 * self.mamba_inner + 2 * self.mamba_states + self.mamba_heads

    @property
    def query_key_value(self) -> int:
        return self.query + 2 * self.key

    @property
    def latent_query(self) -> int:
        return self.heads * (self.plain_width + self.positions)

    @property
    def key_latent_and_positions(self) -> int:
        return self.key_latent + self.positions

    @property
    def latent_key_value(self) -> int:
        return self.heads * (self.plain_width + self.head_dim)

    @property
    def gate_and_up(self) -> int:
        return 2 * self.ffn

    @property
    def expert_gate_and_up(self) -> int:
        return 2 * self.moe_ffn

    @property
    def group_rows(self) -> int:
        """Rows of linear_qkv for one query group: its query heads, one key head, one value head."""
        return (self.heads // self.groups + 2) * self.head_dim


@dataclass(frozen=True)
class TensorShard:
    """Tensor-parallel `rank` of `size` ranks."""

    rank: int
    size: int

    def of(self, total: int) -> slice:
        """This rank's equal share of `total` rows or columns."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


Read = Callable[[slice | None, slice | None], Tensor]
"""Reads the block (rows, columns) of one Hugging Face tensor."""


@dataclass(frozen=True)
class Layout:
    """`shard(reads, dims, shard, local shape) -> local tensor`; `split(full, dims) -> Hugging Face tensors`.

    `local shape` is the shape of the model's parameter on this rank; it matters only for the vocabulary, which may be
    padded.
    """

    shard: Callable[[Sequence[Read], Dims, TensorShard, tuple[int, ...]], Tensor]
    split: Callable[[Tensor, Dims], list[Tensor]]


def _shard_replicated(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
    return reads[0](None, None)


def _split_full(full: Tensor, dims: Dims) -> list[Tensor]:
    return [full]


def columns(total: str) -> Layout:
    """Shards the columns of a [.., total] matrix: the weight of a row-parallel linear layer."""
    return Layout(lambda reads, dims, shard, shape: reads[0](None, shard.of(getattr(dims, total))), _split_full)


def rows(total: str) -> Layout:
    """Shards the rows of a [total, ..] matrix; replicated if the model's layer is not sharded."""

    def shard_of(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
        count = getattr(dims, total)
        return reads[0](None if shape[0] == count else shard.of(count), None)

    return Layout(shard_of, _split_full)


def row_blocks(*tensors: tuple[str, ...]) -> Layout:
    """A parameter of row blocks, each of which is sharded for itself; each Hugging Face tensor holds some in order.

    Args:
        tensors: sizes of the blocks of each Hugging Face tensor.
    """

    def shard_of(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
        parts = []
        for read, names in zip(reads, tensors, strict=True):
            sizes = [getattr(dims, name) for name in names]
            blocks = zip(_read_row_blocks(read, *sizes), sizes, strict=True)
            parts += [block(shard.of(size), None) for block, size in blocks]
        return torch.cat(parts)

    def split(full: Tensor, dims: Dims) -> list[Tensor]:
        return list(full.split([sum(getattr(dims, name) for name in names) for names in tensors]))

    return Layout(shard_of, split)


def _shard_vocab(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
    """Rows of the padded vocabulary; rows beyond the folder's vocabulary are zero."""
    rows = shape[0]
    if rows * shard.size < dims.vocab:
        raise MkdCheckpointError(
            f"the model has {rows * shard.size} vocabulary rows, the Hugging Face folder has {dims.vocab}: "
            "omit --vocab-size and --padded-vocab-size, or give at least the folder's vocab_size"
        )
    first = min(shard.rank * rows, dims.vocab)
    real = reads[0](slice(first, min(first + rows, dims.vocab)), None)
    return torch.cat([real, real.new_zeros(rows - real.shape[0], *real.shape[1:])])


def _split_vocab(full: Tensor, dims: Dims) -> list[Tensor]:
    return [full[: dims.vocab]]


def _shard_qkv(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
    """Rows in the order of query groups: query rows, key rows, value rows of each group.

    With more tensor-parallel ranks than groups, a rank holds a part of a group: whole groups are read and then sliced.
    """
    rows = shard.of(dims.groups * dims.group_rows)
    return _shard_groups(reads, dims, rows, dims.query // dims.groups, dims.group_rows)


def _shard_groups(reads: Sequence[Read], dims: Dims, rows: slice, q_rows: int, group_rows: int) -> Tensor:
    """The rows of a matrix of query groups.

    Args:
        reads: of queries, keys and values.
        dims: of the model.
        rows: of the matrix.
        q_rows: rows of the first tensor for each group.
        group_rows: rows of the matrix for each group.
    """
    first, last = rows.start // group_rows, -(-rows.stop // group_rows)
    count = last - first
    q = reads[0](slice(first * q_rows, last * q_rows), None)
    if q_rows != dims.query // dims.groups:  # each head's queries and its gate
        heads = q.reshape(count, -1, 2, dims.head_dim, *q.shape[1:])
        q = heads.transpose(1, 2).reshape(count * q_rows, *q.shape[1:])
    k, v = (read(slice(first * dims.head_dim, last * dims.head_dim), None) for read in reads[1:])
    groups = torch.cat([t.reshape(count, -1, *t.shape[1:]) for t in (q, k, v)], dim=1)
    start = first * group_rows
    return groups.flatten(0, 1)[rows.start - start : rows.stop - start]


def _split_qkv(full: Tensor, dims: Dims) -> list[Tensor]:
    groups = full.reshape(dims.groups, dims.group_rows, *full.shape[1:])
    sizes = [dims.query // dims.groups, dims.head_dim, dims.head_dim]
    return [part.flatten(0, 1) for part in groups.split(sizes, dim=1)]


def gated_qkv() -> Layout:
    """Query groups with gates: the queries of all heads of a group, their gates, its key, its value.

    The folder's first tensor has the gate of each head after its queries.
    """

    def sizes(dims: Dims) -> tuple[int, int]:
        queries = dims.gated_query // dims.groups
        return queries, queries + 2 * dims.head_dim

    def shard_of(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
        queries, group = sizes(dims)
        return _shard_groups(reads, dims, shard.of(dims.groups * group), queries, group)

    def split(full: Tensor, dims: Dims) -> list[Tensor]:
        queries, group = sizes(dims)
        groups = full.reshape(dims.groups, group, *full.shape[1:])
        q, k, v = groups.split([queries, dims.head_dim, dims.head_dim], dim=1)
        heads = q.reshape(dims.groups, 2, -1, dims.head_dim, *full.shape[1:]).transpose(1, 2)
        return [heads.reshape(dims.gated_query, *full.shape[1:]), k.flatten(0, 1), v.flatten(0, 1)]

    return Layout(shard_of, split)


def _read_row_blocks(read: Read, *sizes: int) -> list[Read]:
    """Readers of consecutive row blocks of one tensor; each addresses its block from row 0."""
    first_rows = [sum(sizes[:n]) for n in range(len(sizes))]
    return [
        lambda rows, cols, first=first: read(slice(first + rows.start, first + rows.stop), cols) for first in first_rows
    ]


def _shard_packed_qkv(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
    """The folder's tensor is [all queries; all keys; all values]."""
    return _shard_qkv(_read_row_blocks(reads[0], dims.query, dims.key, dims.key), dims, shard, shape)


def _split_packed_qkv(full: Tensor, dims: Dims) -> list[Tensor]:
    return [torch.cat(_split_qkv(full, dims))]


def _gate_up(size: str) -> Layout:
    """[gate rows of this rank; up rows of this rank]; a checkpoint stores [all gate rows; all up rows]."""

    def shard_of(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
        rows = shard.of(getattr(dims, size))
        return torch.cat([read(rows, None) for read in reads])

    return Layout(shard_of, lambda full, dims: list(full.chunk(2)))


def _shard_packed_gate_up(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
    """The folder's tensor is [all gate rows; all up rows]."""
    return GATE_UP.shard(_read_row_blocks(reads[0], dims.ffn, dims.ffn), dims, shard, shape)


REPLICATED = Layout(_shard_replicated, _split_full)
ATTENTION_OUTPUT = columns("query")
DOWN = columns("ffn")
SHARED_DOWN = columns("shared_ffn")
EXPERT_DOWN = columns("moe_ffn")
VOCAB = Layout(_shard_vocab, _split_vocab)
QKV = Layout(_shard_qkv, _split_qkv)
PACKED_QKV = Layout(_shard_packed_qkv, _split_packed_qkv)
GATE_UP = _gate_up("ffn")
SHARED_GATE_UP = _gate_up("shared_ffn")
EXPERT_GATE_UP = _gate_up("moe_ffn")
PACKED_GATE_UP = Layout(_shard_packed_gate_up, _split_full)
