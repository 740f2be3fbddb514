"""One microbatch, the same for teacher, student and loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mkd.data.segments import MEGATRON_BOUNDS, joined_bounds, packed_seq_params, segment_hash
from mkd.data.supervised import SupervisedTokens
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.errors import MkdDataError

TEACHER_VIEWS = "teacher_views"
"""Key of a collated sample's views in the tokens of teachers with other tokenizers."""

_PER_TOKEN = ("tokens", "labels", "ce_mask", "kd_mask", "position_ids", "padding", "text", "written", "teacher")


@dataclass(frozen=True)
class KDBatch:
    """Tokens of one microbatch: b rows of s tokens.

    A packed microbatch has one row, the concatenation of its b rows: b is 1 and s is b times as long. Its segments are
    independent texts: position ids restart at 0 in each, and no token attends to another segment. Each is padded at
    its end with tokens of mask 0; the rows' own padding is a segment, or part of the last one.

    `from_sample` returns the whole microbatch on the host, `on_rank` this rank's part of it on its device: with context
    parallelism every tensor is sliced in the same dual-chunk order (`mkd.distributed.context_parallel`), within each
    segment of a packed row and within the whole row otherwise. Labels and positions are set before slicing, so no rank
    needs its neighbors.
    """

    tokens: Tensor
    """[b, s/cp] int64"""
    labels: Tensor
    """[b, s/cp] int64: the token after each token, shifted inside its document before slicing."""
    ce_mask: Tensor
    """[b, s/cp] fp32 weights of cross-entropy: 1 where it is taken, 0 elsewhere; a fraction in messages with one."""
    kd_mask: Tensor
    """[b, s/cp] fp32 weights of the divergence from the teacher, likewise."""
    position_ids: Tensor
    """[b, s/cp] int64"""
    padding: Tensor | None = None
    """[b, s/cp] bool, True at padding, where the masks are 0 too; None if there is no padding."""
    packed: PackedSeqParams | None = None
    """Bounds of the padded segments of the *whole* row, as megatron's THD attention and rotary embeddings take them on
    every pipeline stage (they divide by cp themselves); None if nothing is packed."""
    segment_hashes: tuple[bytes, ...] = ()
    """`segment_hash` of each segment of the whole microbatch in order, or of each row if nothing is packed: 16 bytes
    that depend on the segment's token ids without padding, and on nothing else."""
    teacher_views: tuple["TeacherTokens", ...] = ()
    """The same texts in the tokens of each teacher with another tokenizer."""
    number: int = 0
    """Index among the microbatches of the step."""
    text: Tensor | None = None
    """[b, s/cp] int64 number of each token's text in the whole microbatch, the same in all views; -1 in padding. None
    until `with_texts` fills it in."""
    written: Tensor | None = None
    """[b, s/cp] int64: where the label is a token that the student has written and learns from, its index among the
    written tokens of its text, elsewhere -1; None in steps without written rows."""
    teacher: Tensor | None = None
    """[b, s/cp] int64 index of the only teacher of a token, -1 for all teachers; None: -1 everywhere."""
    supervised: SupervisedTokens | None = None
    """The tokens that enter LM heads and losses, filled in by `with_supervised`; None: all."""

    @classmethod
    def from_sample(cls, sample: Mapping[str, Any], true_vocab: int | None) -> "KDBatch":
        """The whole microbatch of a collated sample, on the host.

        Args:
            sample: tokens, labels, position_ids and either loss_mask or ce_mask and kd_mask, each [b, s]. A packed
                sample also has cu_seqlens and cu_seqlens_padded, [b, n + 1] integers for any n: segment i of a row
                begins at cu_seqlens_padded[i], has cu_seqlens[i + 1] - cu_seqlens[i] tokens of text (0 if it is padding
                only) and then padding up to cu_seqlens_padded[i + 1]. The last bound is s, repeated to the end.
                `written` and `teacher` ([b, s], see the fields) are optional.
            An unpacked sample with padding also has length [b], the tokens of each row that are not padding.
                `teacher_views` is a sequence of such samples in other tokens, with the keys that `AlignedRowLayout.row`
                adds.
            true_vocab: vocabulary size of the model, without padding; None disables the check of ids.

        Raises:
            MkdDataError: a token id is not in the model's vocabulary, or segment bounds are invalid.
        """
        largest = int(torch.maximum(sample["tokens"].max(), sample["labels"].max()))
        smallest = int(torch.minimum(sample["tokens"].min(), sample["labels"].min()))
        if smallest < 0:
            raise MkdDataError(f"the data has token id {smallest}: a file in --data-path is damaged")
        if true_vocab is not None and largest >= true_vocab:
            raise MkdDataError(
                f"the data has token id {largest}, but the model's vocabulary has {true_vocab} tokens (ids up to "
                f"{true_vocab - 1}): --data-path was tokenized with another tokenizer"
            )
        ce_mask = (sample["ce_mask"] if "ce_mask" in sample else sample["loss_mask"]).float()
        tensors = {
            "tokens": sample["tokens"],
            "labels": sample["labels"],
            "ce_mask": ce_mask,
            "kd_mask": sample["kd_mask"].float() if "kd_mask" in sample else ce_mask,
            "position_ids": sample["position_ids"],
            **{name: sample[name] for name in ("written", "teacher") if name in sample},
        }
        rows, row_length = sample["tokens"].shape
        if "cu_seqlens_padded" in sample:
            bounds, lengths = joined_bounds(sample)
            tensors = {name: value.reshape(1, -1) for name, value in tensors.items()}
            packed, starts = packed_seq_params(bounds), bounds[:-1]
        else:
            lengths = sample["length"].tolist() if "length" in sample else [row_length] * rows
            packed, starts = None, range(0, rows * row_length, row_length)
        padding = None
        if sum(lengths) < rows * row_length:
            padding = torch.ones_like(tensors["tokens"], dtype=torch.bool)
        hashes, tokens = [], tensors["tokens"].flatten()
        for start, length in zip(starts, lengths, strict=True):
            hashes.append(segment_hash(tokens[start : start + length]))
            if padding is not None:
                padding.view(-1)[start : start + length] = False
        views = tuple(TeacherTokens.from_sample(view, packed is not None) for view in sample.get(TEACHER_VIEWS, ()))
        batch = cls(**tensors, padding=padding, packed=packed, segment_hashes=tuple(hashes))
        if "written" in tensors:
            views = tuple(view.with_written(batch) for view in views)
        return replace(batch, teacher_views=views)

    @classmethod
    def of_tokens(cls, tokens: Tensor, position_ids: Tensor, bounds: Sequence[int] | None) -> "KDBatch":
        """A whole microbatch for a forward pass without loss (all masks are 0), on the host.

        Args:
            tokens: [b, s] int64; [1, s] if packed.
            position_ids: the same.
            bounds: `KDBatch.bounds` of a packed microbatch; None if nothing is packed.
        """
        nothing = torch.zeros(tokens.shape)
        packed = None if bounds is None else packed_seq_params(bounds)
        return cls(tokens, tokens, nothing, nothing, position_ids, padding=None, packed=packed)

    @property
    def scored_mask(self) -> Tensor:
        """[b, s/cp] fp32 weights of the tokens on which teachers are compared: those of cross-entropy, and 1 for the
        written tokens that the student learns from, which have no cross-entropy."""
        return self.ce_mask if self.written is None else torch.where(self.written >= 0, 1.0, self.ce_mask)

    @property
    def bounds(self) -> tuple[int, ...]:
        """0 and the end of each segment of a row, in tokens. Only for a whole microbatch on the host."""
        if self.packed is None:
            return (0, self.tokens.shape[1])
        return tuple(self.packed.cu_seqlens_q_padded.tolist())

    def segments(self) -> list[tuple[bytes, slice]]:
        """(hash, positions among all b * s) of each segment that has text, without its padding, in order. Only for a
        whole microbatch on the host."""
        bounds = self.bounds
        if self.packed is None:
            bounds = range(0, self.tokens.numel() + 1, self.tokens.shape[1])
        found = []
        for digest, (start, end) in zip(self.segment_hashes, pairwise(bounds), strict=True):
            padded = 0 if self.padding is None else int(self.padding.view(-1)[start:end].sum())
            if end - padded > start:
                found.append((digest, slice(start, end - padded)))
        return found

    def with_texts(self) -> "KDBatch":
        """This whole microbatch, on the host, with the text number of each token and of each chunk filled in.

        Raises:
            MkdDataError: the views do not have the same number of texts.
        """
        text, count = self._numbered()
        views = []
        for view in self.teacher_views:
            own, own_count = view.batch._numbered()
            if own_count != count:
                raise MkdDataError(
                    f"a microbatch has {count} texts in the student's tokens and {own_count} in a teacher's"
                )
            chunk_text = torch.full((view.chunks,), -1)
            inside = view.student_chunk >= 0
            chunk_text[view.student_chunk[inside]] = text[inside]
            views.append(replace(view, batch=replace(view.batch, text=own), chunk_text=chunk_text))
        return replace(self, text=text, teacher_views=tuple(views))

    def with_supervised(self) -> "KDBatch":
        """This whole microbatch, on the host, restricted to supervised tokens; those of a view are also its tokens in
        text chunks."""
        views = []
        for view in self.teacher_views:
            tokens = SupervisedTokens.of(view.chunk >= 0, view.batch.ce_mask)
            views.append(replace(view, batch=replace(view.batch, supervised=tokens)))
        return replace(self, supervised=SupervisedTokens.of(self.ce_mask, self.kd_mask), teacher_views=tuple(views))

    def _numbered(self) -> tuple[Tensor, int]:
        """([b, s] text number of each token, number of texts)."""
        text, segments = torch.full_like(self.tokens, -1), self.segments()
        for number, (_, positions) in enumerate(segments):
            text.view(-1)[positions] = number
        return text, len(segments)

    def _per_token(self) -> dict[str, Tensor]:
        """All tensors of [b, s/cp] that are not None."""
        return {name: value for name in _PER_TOKEN if (value := getattr(self, name)) is not None}

    def cp_slice(self, rank: int, size: int) -> "KDBatch":
        """Slice of a whole microbatch that one of `size` context-parallel ranks holds.

        Raises:
            MkdDataError: the length of a segment, or of an unpacked row, is not divisible by 2 * size.
        """
        if size == 1:
            return self
        positions = dual_chunk_positions(self.bounds, rank, size).to(self.tokens.device)
        parts = {name: value.index_select(1, positions) for name, value in self._per_token().items()}
        views = tuple(view.cp_slice(positions, rank, size) for view in self.teacher_views)
        supervised = None if self.supervised is None else self.supervised.cp_slice(positions)
        return replace(self, **parts, teacher_views=views, supervised=supervised)

    def to_device(self) -> "KDBatch":
        """This batch on the current device."""
        # "cuda" is the CPU where mkd.cpu is active.
        moved = {name: to_device(value) for name, value in self._per_token().items()}
        packed = self.packed
        if packed is not None:
            bounds = to_device(packed.cu_seqlens_q_padded)
            packed = replace(packed, **dict.fromkeys(MEGATRON_BOUNDS, bounds))
        views = tuple(view.to_device(self) for view in self.teacher_views)
        supervised = None if self.supervised is None else self.supervised.to_device()
        return replace(self, **moved, packed=packed, teacher_views=views, supervised=supervised)

    def on_rank(self, cp: dist.ProcessGroup) -> "KDBatch":
        """This rank's part of a whole microbatch, on its device."""
        return self.cp_slice(cp.rank(), cp.size()).to_device()

    def content_hash(self) -> Tensor:
        """[1] int64 on the batch's device; changes with any token, label, mask or bound, except by chance."""
        parts = [self.tokens.flatten(), self.labels.flatten()]
        parts += [mask.flatten().contiguous().view(torch.int32).long() for mask in (self.ce_mask, self.kd_mask)]
        if self.packed is not None:
            parts.append(self.packed.cu_seqlens_q_padded.long())
        for view in self.teacher_views:
            parts += [view.student_chunk.flatten(), view.chunk.flatten(), view.batch.content_hash()]
        joined = torch.cat(parts)
        index = torch.arange(1, joined.numel() + 1, device=joined.device)
        return ((joined + 1) * (index * 2654435761 % 2147483647)).sum().view(1)


def to_device(value: Tensor) -> Tensor:
    """A copy on the current device. From memory that is not pinned, the host would wait for the device's work."""
    return value if value.is_cuda else value.pin_memory().to("cuda", non_blocking=True)


@dataclass(frozen=True)
class TeacherTokens:
    """One view of a microbatch: its texts in the tokens of a teacher with another tokenizer, aligned with the student.

    Its rows have the same texts in the same order, with their own numbers of tokens. Text chunks are runs of tokens
    that cover the same characters in both views and on which the divergence is taken. They are numbered over the whole
    microbatch, alike on all context-parallel ranks. The chunk of a position is that of its label.
    """

    batch: KDBatch
    """[b, t/cp] tokens, labels, masks and bounds in this view."""
    student_chunk: Tensor
    """[b, s/cp] int64 chunk of each position of the student's rows, -1 for none; on the host, as the next three."""
    student_first: Tensor
    """[b, s/cp] bool, True if the position predicts the first token of its chunk."""
    chunk: Tensor
    """[b, t/cp] int64 chunk of each position of the teacher's rows."""
    first: Tensor
    """[b, t/cp] bool, as `student_first`."""
    chunks: int
    """Number of chunks in the whole microbatch, on every rank."""
    chunk_weight: Tensor | None = None
    """[chunks] fp32 weight of each chunk's divergence, on the host as the next two, which are set in steps with written
    rows: that of the chunk's first token in the student's KD mask. None: 1."""
    chunk_written: Tensor | None = None
    """[chunks] int64 `KDBatch.written` of the chunk's first token."""
    chunk_teacher: Tensor | None = None
    """[chunks] int64 `KDBatch.teacher` of each chunk; None as there."""
    chunk_text: Tensor | None = None
    """[chunks] int64 text number of each chunk, on the host; see `KDBatch.with_texts`."""
    labels: Tensor | None = None
    """[b, t/cp] int64 the labels of `batch`, on the host; this and the next two are None until `to_device`."""
    student_labels: Tensor | None = None
    """[b, s/cp] int64 the labels of the student's rows, on the host."""
    student_ce: Tensor | None = None
    """[b, s/cp] bool, True where the student's rows have cross-entropy, on the host."""

    @classmethod
    def from_sample(cls, sample: Mapping[str, Any], packed: bool) -> "TeacherTokens":
        """See `KDBatch.from_sample`; packed microbatches have one row."""
        before = torch.cumsum(sample["chunks"], 0) - sample["chunks"]
        numbers = [
            torch.where(chunk >= 0, chunk + before[:, None], -1) for chunk in (sample["student_chunk"], sample["chunk"])
        ]
        firsts = [chunk_starts(chunk) for chunk in numbers]
        if packed:
            numbers, firsts = ([part.reshape(1, -1) for part in parts] for parts in (numbers, firsts))
        batch = KDBatch.from_sample(sample, None)
        return cls(batch, numbers[0], firsts[0], numbers[1], firsts[1], int(sample["chunks"].sum()))

    def with_written(self, student: KDBatch) -> "TeacherTokens":
        """This whole view with the properties of its chunks in a step with written rows.

        Args:
            student: the microbatch that this is a view of, whole and on the host.
        """
        chunk = self.student_chunk[self.student_first]

        def of_chunks(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.new_empty(self.chunks).index_copy_(0, chunk, values[self.student_first])

        weight, written, teacher = map(of_chunks, (student.kd_mask, student.written, student.teacher))
        return replace(self, chunk_weight=weight, chunk_written=written, chunk_teacher=teacher)

    @property
    def weight_of_chunks(self) -> float:
        """Sum of the weights of all chunks of the whole microbatch."""
        return self.chunks if self.chunk_weight is None else float(self.chunk_weight.sum(dtype=torch.float64))

    def cp_slice(self, student_positions: Tensor, rank: int, size: int) -> "TeacherTokens":
        """Slice that a context-parallel rank holds; `student_positions` are those of its student tokens."""
        own = dual_chunk_positions(self.batch.bounds, rank, size)
        return replace(
            self,
            batch=self.batch.cp_slice(rank, size),
            student_chunk=self.student_chunk.index_select(1, student_positions),
            student_first=self.student_first.index_select(1, student_positions),
            chunk=self.chunk.index_select(1, own),
            first=self.first.index_select(1, own),
        )

    def to_device(self, student: KDBatch) -> "TeacherTokens":
        """This view with its tokens on the current device.

        Args:
            student: the batch that this is a view of, on the host.
        """
        labels, student_ce = self.batch.labels, student.ce_mask != 0
        return replace(
            self,
            batch=self.batch.to_device(),
            labels=labels,
            student_labels=student.labels,
            student_ce=student_ce,
        )


def chunk_starts(chunk: Tensor) -> Tensor:
    """[b, s] bool, True at the first position of each chunk, in whole rows of chunk numbers [b, s]."""
    before = torch.nn.functional.pad(chunk[:, :-1], (1, 0), value=-1)
    return (chunk >= 0) & (chunk != before)
