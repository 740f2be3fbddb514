"""Tokens of a microbatch by text chunk, and the groups of chunks in which the loss is computed.

A text chunk may lie on several context-parallel ranks, and its teacher tokens on others than its student tokens. The
rank of its first student token owns it: the other tokens are sent there as hidden states, and the student's gradient is
returned the same way. A chunk is then whole wherever it is computed, and no sum over a chunk is ever taken over ranks.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TokenChunks:
    """The text chunks of a microbatch, for the tokens of one context-parallel rank.

    A token belongs to the chunk of its label. Chunks are numbered over the whole microbatch, alike on all
    context-parallel ranks. Tokens are in the order of the hidden states (sequence first). Tensors may be on the host,
    which saves a copy from the device.
    """

    student: Tensor
    """[N_s] int64 chunk of each student token, -1 for none."""
    student_first: Tensor
    """[N_s] bool, True if the label is the first token of its chunk (`mkd.data.batch.chunk_starts`)."""
    teacher: Tensor
    """[N_t] int64 chunk of each teacher token."""
    teacher_first: Tensor
    """[N_t] bool, as `student_first`."""
    teacher_labels: Tensor
    """[N_t] int64 labels of the teacher's tokens; anything for a token without a chunk."""
    weight: Tensor
    """[C] fp32 KD weight of each chunk; a chunk of weight 0 has no effect, whatever its tokens hold."""
    cp_group: ProcessGroup | None = None
    """Ranks with the other tokens of the microbatch; None: there are none."""
    on_host: "HostTokens | None" = None
    """Copies that save the plan of one context-parallel rank from waiting for the device; None: the plan makes them."""


class HostTokens(NamedTuple):
    """Tensors on the host that hold what the device holds: labels, and where weights are not 0."""

    labels: Tensor
    """[N_s] int64 labels of the student's tokens."""
    teacher_labels: Tensor
    """[N_t] int64"""
    with_ce: Tensor
    """[N_s] bool, True where the CE weight is not 0."""
    with_kd: Tensor
    """[C] bool, True where the KD weight is not 0."""

    @classmethod
    def copied(cls, chunks: TokenChunks, labels: Tensor, ce_weight: Tensor | None) -> "HostTokens":
        """Copies that wait for the device."""
        with_ce = torch.zeros(len(labels), dtype=torch.bool) if ce_weight is None else (ce_weight != 0).cpu()
        return cls(labels.cpu(), chunks.teacher_labels.cpu(), with_ce, (chunks.weight != 0).cpu())


class GroupTokens(NamedTuple):
    """One model's tokens in a group of chunks: the first tokens of all chunks, in the order of the chunks, then their
    second tokens, and so on."""

    index: Tensor
    """int64 index among the hidden states of this rank, received ones included."""
    labels: Tensor
    """int64"""
    chunks: Tensor
    """int64 chunk in the group, from 0 up; undefined in a group without chunks."""
    continuation: tuple[slice, ...]
    """Second tokens, third tokens ...: each slice has at most one token per chunk."""
    count: Tensor
    """[chunks] fp32 tokens of each chunk."""
    by_chunk: Tensor
    """[n] int64 the same tokens chunk by chunk: the position of each among these."""
    start: Tensor
    """[chunks] int64 index in `by_chunk` of each chunk's first token."""

    def totals(self, values: Tensor) -> Tensor:
        """[n, ...] per token -> [chunks, ...] sums over the tokens of each chunk, in a fixed order."""
        total = values[: len(self.count)].clone()
        for part in self.continuation:
            chunks = self.chunks[part]
            total[chunks] = total[chunks] + values[part]
        return total


class ChunkGroup(NamedTuple):
    """Whole chunks that are computed together; or tokens without a chunk, which have cross-entropy only."""

    numbers: Tensor
    """[chunks] int64 chunk numbers in the microbatch."""
    student: GroupTokens
    teacher: GroupTokens


@dataclass(frozen=True)
class ChunkPlan:
    """The groups that one rank computes, and the tokens that it sends to other ranks."""

    groups: list[ChunkGroup]
    sent: Tensor
    """[n] int64 tokens of this rank in chunks that another rank owns."""
    max_sent: int
    """The largest n of all ranks: each sends that many, padding included. 0: nothing is sent."""

    @classmethod
    def of(
        cls,
        chunks: TokenChunks,
        labels: Tensor,
        ce_weight: Tensor | None,
        *,
        vocabularies: tuple[int, int],
        budget: int,
        device: torch.device,
    ) -> "ChunkPlan":
        """The plan of this rank; collective over the context-parallel group.

        Communication: one all-gather of 8 (2 N_s + 2 N_t) bytes over that group, and one copy to the host. One rank
        with `TokenChunks.on_host` copies nothing from the device. All index tensors are copied to the device at once.

        Args:
            chunks: chunks and the teacher's labels.
            labels, ce_weight: [N_s] of the student's tokens.
            vocabularies: true sizes, the student's and the teacher's.
            budget: tokens per group, of the model with more; a chunk with more tokens is a group by itself.
            device: device of the index tensors.

        Raises:
            ValueError: shapes that do not fit, chunk numbers out of range, or a chunk with a weight that lacks
                tokens or does not have exactly one first token for each model.
        """
        _check_shapes(chunks, labels)
        group = chunks.cp_group
        rank = 0 if group is None else group.rank()
        n_s, n_t = len(labels), len(chunks.teacher_labels)
        known = chunks.on_host or HostTokens.copied(chunks, labels, ce_weight)
        codes = _code(chunks.student, chunks.student_first), _code(chunks.teacher, chunks.teacher_first)
        everywhere = _gather([codes[0], known.labels, codes[1], known.teacher_labels], group, device)
        code_s, label_s, code_t, label_t = everywhere.split([n_s, n_s, n_t, n_t], dim=1)
        counts = known.with_kd
        student, teacher = (_ChunkTokens.of(name, c, counts) for name, c in (("student", code_s), ("teacher", code_t)))
        for name, tokens, label, size in zip(
            ("student", "teacher"), (student, teacher), (label_s, label_t), vocabularies, strict=True
        ):
            tokens.check(name, counts, label.reshape(-1), size)
        owner = torch.full((len(counts),), -1).index_put_(
            (student.chunk[student.first],), student.position[student.first] // max(n_s, 1)
        )
        away = owner[student.chunk] != student.position // max(n_s, 1)
        sent = _by_rank(student.position[away], n_s, len(code_s))
        most = max(len(positions) for positions in sent)
        # Own tokens first, then those that each rank sent, padded to the same number.
        local = torch.full((code_s.numel(),), -1)
        local[rank * n_s : (rank + 1) * n_s] = torch.arange(n_s)
        for sender, positions in enumerate(sent):
            if sender != rank:
                local[positions] = n_s + sender * most + torch.arange(len(positions))
        own = (counts & (owner == rank)).nonzero().squeeze(1)
        own_s = student.of_chunks(own, len(counts), local, label_s.reshape(-1))
        own_t = teacher.of_chunks(own, len(counts), torch.arange(code_t.numel()), label_t.reshape(-1))
        groups = _groups(own, own_s, own_t, budget)
        if ce_weight is not None:
            rest = known.with_ce.clone()
            rest[own_s.position[own_s.position < n_s]] = False
            groups += _groups_without_chunks(rest.nonzero().squeeze(1), label_s[rank], budget)
        return cls(*_on_device(groups, sent[rank] - rank * n_s, device), most)


class _ChunkTokens(NamedTuple):
    """One model's tokens of chunks with a weight, on the host, each [n]."""

    position: Tensor
    """Rank * tokens per rank + token; in the result of `of_chunks`, the caller's index of that position."""
    chunk: Tensor
    first: Tensor
    label: Tensor | None = None

    @classmethod
    def of(cls, name: str, code: Tensor, counts: Tensor) -> "_ChunkTokens":
        """From `_code` [ranks, tokens]."""
        code = code.reshape(-1)
        chunk = code >> 1
        if len(chunk) and chunk.max() >= len(counts):
            raise ValueError(f"a {name} token is in chunk {chunk.max().item()}; there are weights of {len(counts)}")
        position = ((chunk >= 0) & counts[chunk] if len(counts) else chunk > 0).nonzero().squeeze(1)
        return cls(position, chunk[position], (code[position] & 1).bool())

    def check(self, name: str, counts: Tensor, labels: Tensor, vocabulary: int) -> None:
        """Raise ValueError unless each chunk with a weight has one first token, and all its labels are legal."""
        firsts = self.chunk[self.first].bincount(minlength=len(counts))
        wrong = (counts & (firsts != 1)).nonzero()
        if len(wrong):
            chunk = wrong[0].item()
            tokens = (self.chunk == chunk).sum().item()
            raise ValueError(
                f"chunk {chunk} has a weight, {tokens} {name} tokens and {firsts[chunk].item()} first ones; "
                "exactly 1 is needed"
            )
        labels = labels[self.position]
        illegal = ((labels < 0) | (labels >= vocabulary)).nonzero()
        if len(illegal):
            index = illegal[0].item()
            raise ValueError(
                f"chunk {self.chunk[index].item()} has {name} label {labels[index].item()}; the vocabulary has "
                f"{vocabulary}"
            )

    def of_chunks(self, own: Tensor, chunks: int, local: Tensor, labels: Tensor) -> "_ChunkTokens":
        """Tokens of the chunks `own`, renumbered from 0, sorted by chunk with first tokens first."""
        number = torch.full((chunks,), -1).index_put_((own,), torch.arange(len(own)))
        chunk = number[self.chunk]
        keep = (chunk >= 0).nonzero().squeeze(1)
        keep = keep[(chunk[keep] * 2 + (~self.first[keep]).long()).argsort(stable=True)]
        position = self.position[keep]
        return _ChunkTokens(local[position], chunk[keep], self.first[keep], labels[position])


def _check_shapes(chunks: TokenChunks, labels: Tensor) -> None:
    for name, tensor, like in (
        ("student", chunks.student, labels),
        ("student_first", chunks.student_first, labels),
        ("teacher", chunks.teacher, chunks.teacher_labels),
        ("teacher_first", chunks.teacher_first, chunks.teacher_labels),
    ):
        if tensor.shape != like.shape or tensor.dim() != 1:
            raise ValueError(f"chunks.{name} has shape {tuple(tensor.shape)}; there are labels {tuple(like.shape)}")


def _code(chunk: Tensor, first: Tensor) -> Tensor:
    """Encodes both in one number: 2 * chunk + first, negative without a chunk."""
    return chunk * 2 + first.to(chunk.dtype)


def _gather(parts: list[Tensor], group: ProcessGroup | None, device: torch.device) -> Tensor:
    """[ranks, sum of lengths] on the host."""
    if group is None or group.size() == 1:
        return torch.cat([p.cpu() for p in parts])[None]
    packed = torch.cat([p.to(device) for p in parts])
    gathered = packed.new_empty((group.size() * len(packed),))
    torch.distributed.all_gather_into_tensor(gathered, packed, group=group)
    return gathered.view(group.size(), -1).cpu()


def _by_rank(positions: Tensor, tokens: int, ranks: int) -> list[Tensor]:
    """Ascending positions over all ranks -> those of each rank, of `tokens` tokens each."""
    bounds = torch.arange(1, ranks) * tokens
    return list(positions.tensor_split(torch.searchsorted(positions, bounds).tolist()))


def _groups(own: Tensor, student: _ChunkTokens, teacher: _ChunkTokens, budget: int) -> list[ChunkGroup]:
    """On the host: groups of whole chunks, in order, with about equal numbers of tokens."""
    sizes = [model.chunk.bincount(minlength=len(own)) for model in (student, teacher)]
    load = torch.maximum(*sizes).cumsum(0)
    bounds = _bounds(load, budget)
    models = []
    for model, size in zip((student, teacher), sizes, strict=True):
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
        nth = torch.arange(len(model.chunk)) - ends[model.chunk]
        group = torch.searchsorted(torch.tensor(bounds[1:], dtype=torch.int64), model.chunk, right=True)
        most = int(size.max()) if len(size) else 0
        order = (group * (most + 1) + nth).argsort(stable=True)
        first = torch.tensor(bounds, dtype=torch.int64)[group]
        by_chunk = torch.empty_like(order).index_put_((order,), torch.arange(len(order))) - ends[first]
        tensors = [model.position[order], model.label[order], (model.chunk - first)[order], by_chunk]
        starts = torch.full_like(own, -1)
        starts[model.chunk] = ends[model.chunk] - ends[first]
        models.append((tensors, [size.float(), starts], ends.tolist(), nth[order]))
    return [ChunkGroup(own[a:b], *(_group_tokens(*parts, a, b) for parts in models)) for a, b in pairwise(bounds)]


def _group_tokens(
    tensors: list[Tensor], of_chunks: list[Tensor], ends: list[int], nth: Tensor, start: int, end: int
) -> GroupTokens:
    """One model's tokens of the chunks start .. end.

    Args:
        tensors: index, labels, chunks and `by_chunk` of all tokens, group by group.
        of_chunks: `count` and `start` of all chunks.
        ends: index of each chunk's first token, and the number of all tokens.
        nth: index of each token in its chunk.
        start, end: chunks of the group.
    """
    tokens = slice(ends[start], ends[end])
    lengths = nth[tokens].bincount().cumsum(0).tolist()
    continuation = tuple(slice(a, b) for a, b in pairwise(lengths))
    index, labels, chunks, by_chunk = (t[tokens] for t in tensors)
    count, first = (x[start:end] for x in of_chunks)
    return GroupTokens(index, labels, chunks, continuation, count, by_chunk, first)


def _bounds(load: Tensor, budget: int) -> list[int]:
    """0 and the ends of the groups of chunks, from the cumulative number of tokens of the chunks."""
    if not len(load):
        return [0]
    total = int(load[-1])
    fair = -(-total // -(-total // budget))
    bounds = [0]
    while bounds[-1] < len(load):
        done = int(load[bounds[-1] - 1]) if bounds[-1] else 0
        end = int(torch.searchsorted(load, done + fair, right=True))
        bounds.append(max(end, bounds[-1] + 1))
    return bounds


def _groups_without_chunks(tokens: Tensor, labels: Tensor, budget: int) -> list[ChunkGroup]:
    """On the host."""
    nothing, count = torch.empty(0, dtype=torch.int64), torch.empty(0)
    empty = GroupTokens(nothing, nothing, nothing, (), count, nothing, nothing)
    groups = []
    for part in tokens.split(budget) if len(tokens) else ():
        student = GroupTokens(part, labels[part], torch.zeros_like(part), (), count, nothing, nothing)
        groups.append(ChunkGroup(nothing, student, empty))
    return groups


def _on_device(groups: list[ChunkGroup], sent: Tensor, device: torch.device) -> tuple[list[ChunkGroup], Tensor]:
    """The same on the device."""
    parts: list[Tensor] = [sent]
    for group in groups:
        parts.append(group.numbers)
        for tokens in (group.student, group.teacher):
            parts += [x for x in tokens if isinstance(x, Tensor)]
    moved = iter(_copied_at_once(parts, device))

    def tokens_of(tokens: GroupTokens) -> GroupTokens:
        return GroupTokens(*(next(moved) if isinstance(x, Tensor) else x for x in tokens))

    sent = next(moved)
    return [ChunkGroup(next(moved), tokens_of(group.student), tokens_of(group.teacher)) for group in groups], sent


_ALIGNMENT = 16
"""Bytes; Triton compiles a kernel again for a pointer that is not a multiple of them."""


def _copied_at_once(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """1-D tensors on the device after one copy that does not wait for it; each begins at a multiple of `_ALIGNMENT`."""
    sizes = [x.numel() * x.itemsize for x in tensors]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    # Only copies from pinned memory do not wait.
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, size, x in zip(starts, sizes, tensors, strict=False):
        packed[start : start + size].view(x.dtype).copy_(x)
    packed = packed.to(device, non_blocking=True)
    return [packed[start : start + size].view(x.dtype) for start, size, x in zip(starts, sizes, tensors, strict=False)]
