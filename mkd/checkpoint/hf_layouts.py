"""How tensors of a Hugging Face folder lie inside one Megatron parameter, in both directions.

A layout cuts this rank's part of a parameter out of the Hugging Face tensors (`shard`, reading only the bytes it needs)
and cuts a whole parameter, as a torch_dist checkpoint stores it, into the Hugging Face tensors (`split`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.errors import MkdCheckpointError


@dataclass(frozen=True)
class Dims:
    """Sizes that the tensor tables refer to by name."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.groups * self.head_dim

    @property
    def group_rows(self) -> int:
        """Rows of linear_qkv for one query group: its query heads, one key head, one value head."""
        return (self.heads // self.groups + 2) * self.head_dim


@dataclass(frozen=True)
class Part:
    """The part of a parameter that one rank holds: tensor-parallel `rank` of `size`, and its local shape."""

    rank: int
    size: int
    shape: tuple[int, ...]

    def rows(self, total: int) -> slice:
        """This rank's equal share of `total` rows."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


Read = Callable[[slice | None, slice | None], Tensor]
"""Reads the block (rows, columns) of one Hugging Face tensor."""


@dataclass(frozen=True)
class Layout:
    """`shard(reads, dims, part) -> local tensor`, `split(whole, dims) -> Hugging Face tensors`."""

    shard: Callable[[Sequence[Read], Dims, Part], Tensor]
    split: Callable[[Tensor, Dims], list[Tensor]]


def _shard_replicated(reads: Sequence[Read], dims: Dims, part: Part) -> Tensor:
    return reads[0](None, None)


def _split_replicated(whole: Tensor, dims: Dims) -> list[Tensor]:
    return [whole]


def _shard_row(reads: Sequence[Read], dims: Dims, part: Part) -> Tensor:
    width = part.shape[1]
    return reads[0](None, slice(part.rank * width, (part.rank + 1) * width))


def _shard_vocab(reads: Sequence[Read], dims: Dims, part: Part) -> Tensor:
    """Rows of the padded vocabulary: those past the folder's vocabulary are zero."""
    rows = part.shape[0]
    if rows * part.size < dims.vocab:
        raise MkdCheckpointError(
            f"the model has {rows * part.size} vocabulary rows, the Hugging Face folder has {dims.vocab}: "
            "leave --vocab-size and --padded-vocab-size out, or give at least the folder's vocab_size"
        )
    first = min(part.rank * rows, dims.vocab)
    real = reads[0](slice(first, min(first + rows, dims.vocab)), None)
    return torch.cat([real, real.new_zeros(rows - real.shape[0], *real.shape[1:])])


def _split_vocab(whole: Tensor, dims: Dims) -> list[Tensor]:
    return [whole[: dims.vocab]]


def _shard_qkv(reads: Sequence[Read], dims: Dims, part: Part) -> Tensor:
    """For each query group: its query rows, its key rows, its value rows.

    With more tensor-parallel ranks than groups a rank holds part of a group, so whole groups are read and then cut.
    """
    rows = part.rows(dims.groups * dims.group_rows)
    first, last = rows.start // dims.group_rows, -(-rows.stop // dims.group_rows)
    count = last - first
    q_rows = dims.query // dims.groups
    q = reads[0](slice(first * q_rows, last * q_rows), None)
    k, v = (read(slice(first * dims.head_dim, last * dims.head_dim), None) for read in reads[1:])
    groups = torch.cat([t.reshape(count, -1, *t.shape[1:]) for t in (q, k, v)], dim=1)
    start = first * dims.group_rows
    return groups.flatten(0, 1)[rows.start - start : rows.stop - start]


def _split_qkv(whole: Tensor, dims: Dims) -> list[Tensor]:
    groups = whole.reshape(dims.groups, dims.group_rows, *whole.shape[1:])
    sizes = [dims.query // dims.groups, dims.head_dim, dims.head_dim]
    return [part.flatten(0, 1) for part in groups.split(sizes, dim=1)]


def _shard_gate_up(reads: Sequence[Read], dims: Dims, part: Part) -> Tensor:
    """[gate of this rank; up of this rank]; the checkpoint's global tensor is [whole gate; whole up]."""
    rows = part.rows(dims.ffn)
    return torch.cat([read(rows, None) for read in reads])


def _split_gate_up(whole: Tensor, dims: Dims) -> list[Tensor]:
    return list(whole.chunk(2))


REPLICATED = Layout(_shard_replicated, _split_replicated)
ROW_PARALLEL = Layout(_shard_row, _split_replicated)
VOCAB = Layout(_shard_vocab, _split_vocab)
QKV = Layout(_shard_qkv, _split_qkv)
GATE_UP = Layout(_shard_gate_up, _split_gate_up)
