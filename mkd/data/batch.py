"""One microbatch, the same for teacher, student and loss."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mkd.distributed.context_parallel import dual_chunk_places
from mkd.errors import MkdDataError

OTHERS = "others"
"""Key of the samples in other tokens."""
_PER_TOKEN = ("tokens", "labels", "ce_mask", "kd_mask", "position_ids", "padding", "text")


@dataclass(frozen=True)
class KDBatch:
    """Tokens of one microbatch: b rows of s tokens.

    A packed microbatch has one row, in which its b rows follow each other: b is 1 and s is b times as long. Its
    segments are independent texts: positions begin anew in each, and no token attends to another segment. Each is
    padded at its end with tokens of mask 0; the rows' own padding is a segment, or part of the last one.

    `from_sample` gives the whole microbatch on the host, `on_rank` this rank's part of it on its device: with context
    parallelism every tensor is cut in the same dual-chunk order (`mkd.distributed.context_parallel`), within each
    segment of a packed row and within the whole row otherwise. Labels and positions are set before slicing, so no rank
    needs its neighbors.
    """

    tokens: Tensor
    """[b, s/cp] int64"""
    labels: Tensor
    """[b, s/cp] int64: the next token of each token, shifted inside its document before anything is sliced."""
    ce_mask: Tensor
    """[b, s/cp] fp32, 1 where cross-entropy is taken."""
    kd_mask: Tensor
    """[b, s/cp] fp32, 1 where the divergence from the teacher is taken."""
    position_ids: Tensor
    """[b, s/cp] int64"""
    padding: Tensor | None = None
    """[b, s/cp] bool, True where there is no text; None where there is text everywhere. Masks are 0 there, too."""
    packed: PackedSeqParams | None = None
    """Where the padded segments of the *whole* row begin and end, as megatron's THD attention and rotary embeddings
    take them on every pipeline stage (they divide by cp themselves); None when nothing is packed."""
    keys: tuple[bytes, ...] = ()
    """16 bytes for each segment of the whole microbatch in order, or for each row when nothing is packed: they depend
    on the segment's token ids without its padding and on nothing else."""
    others: tuple["TeacherTokens", ...] = ()
    """The same texts in the tokens of teachers that have other tokenizers, one for each of those."""
    number: int = 0
    """Among the microbatches of its step."""
    text: Tensor | None = None
    """[b, s/cp] int64, the number of the text that each token belongs to among those of the whole microbatch, the same
    on all sides; -1 in padding. None where `with_texts` has not filled it in."""

    @classmethod
    def from_sample(cls, sample: Mapping[str, Any], true_vocab: int | None) -> "KDBatch":
        """The whole microbatch of a collated sample, on the host.

        Args:
            sample: tokens, labels, position_ids and either loss_mask or ce_mask and kd_mask, each [b, s]. Of a packed
                sample also cu_seqlens and cu_seqlens_padded, [b, n + 1] integers of any n: segment i of a row begins
                at cu_seqlens_padded[i], has cu_seqlens[i + 1] - cu_seqlens[i] tokens of text (0 if it is padding only)
                and then padding up to cu_seqlens_padded[i + 1]. The last bound is s; repeated bounds fill up the rest.
                Of an unpacked sample also length [b], the tokens of a row that are not padding, if any are. `others` is
                a sequence of such samples in other tokens, with what `PairedLayout.row` adds.
            true_vocab: ids from here up do not exist in the model; None looks at none.

        Raises:
            MkdDataError: a token id that is not in the model's vocabulary, or bounds that are none.
        """
        largest = int(torch.maximum(sample["tokens"].max(), sample["labels"].max()))
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
        }
        rows, row_length = sample["tokens"].shape
        if "cu_seqlens_padded" in sample:
            bounds, lengths = _join_rows(sample)
            tensors = {name: value.reshape(1, -1) for name, value in tensors.items()}
            packed, starts = _packed_seq_params(bounds), bounds[:-1]
        else:
            lengths = sample["length"].tolist() if "length" in sample else [row_length] * rows
            packed, starts = None, range(0, rows * row_length, row_length)
        padding = None
        if sum(lengths) < rows * row_length:
            padding = torch.ones_like(tensors["tokens"], dtype=torch.bool)
        keys, tokens = [], tensors["tokens"].flatten()
        for start, length in zip(starts, lengths, strict=True):
            keys.append(segment_key(tokens[start : start + length]))
            if padding is not None:
                padding.view(-1)[start : start + length] = False
        others = tuple(TeacherTokens.from_sample(other, packed is not None) for other in sample.get(OTHERS, ()))
        return cls(**tensors, padding=padding, packed=packed, keys=tuple(keys), others=others)

    @classmethod
    def of_tokens(cls, tokens: Tensor, position_ids: Tensor, bounds: Sequence[int] | None) -> "KDBatch":
        """A whole microbatch that a model can read and from which nothing is learned, on the host.

        Args:
            tokens: [b, s] int64; [1, s] if packed.
            position_ids: the same.
            bounds: see `bounds`, of a packed microbatch; None when nothing is packed.
        """
        nothing = torch.zeros(tokens.shape)
        packed = None if bounds is None else _packed_seq_params(bounds)
        return cls(tokens, tokens, nothing, nothing, position_ids, padding=None, packed=packed)

    @property
    def bounds(self) -> tuple[int, ...]:
        """0 and the end of each segment of a row, in tokens; of a whole microbatch on the host."""
        if self.packed is None:
            return (0, self.tokens.shape[1])
        return tuple(self.packed.cu_seqlens_q_padded.tolist())

    def segments(self) -> list[tuple[bytes, slice]]:
        """Of a whole microbatch on the host: the key of each segment with a text, and the places of that text, in
        order, among all b * s."""
        bounds = self.bounds
        if self.packed is None:
            bounds = range(0, self.tokens.numel() + 1, self.tokens.shape[1])
        found = []
        for key, (start, end) in zip(self.keys, pairwise(bounds), strict=True):
            padded = 0 if self.padding is None else int(self.padding.view(-1)[start:end].sum())
            if end - padded > start:
                found.append((key, slice(start, end - padded)))
        return found

    def with_texts(self) -> "KDBatch":
        """The same whole microbatch, on the host, with the number of each token's and of each chunk's text.

        Raises:
            MkdDataError: the sides do not have the same number of texts.
        """
        text, count = self._numbered()
        others = []
        for other in self.others:
            own, own_count = other.batch._numbered()
            if own_count != count:
                raise MkdDataError(f"a microbatch has {count} texts in the student's tokens and {own_count} in others")
            chunk_text = torch.full((other.chunks,), -1)
            inside = other.student_chunk >= 0
            chunk_text[other.student_chunk[inside]] = text[inside]
            others.append(replace(other, batch=replace(other.batch, text=own), chunk_text=chunk_text))
        return replace(self, text=text, others=tuple(others))

    def _numbered(self) -> tuple[Tensor, int]:
        """[b, s] number of each token's text, and how many texts there are."""
        text, segments = torch.full_like(self.tokens, -1), self.segments()
        for number, (_, places) in enumerate(segments):
            text.view(-1)[places] = number
        return text, len(segments)

    def _per_token(self) -> dict[str, Tensor]:
        """The tensors of [b, s/cp] that there are."""
        return {name: value for name in _PER_TOKEN if (value := getattr(self, name)) is not None}

    def cp_slice(self, rank: int, size: int) -> "KDBatch":
        """What one of `size` context-parallel ranks holds of a whole microbatch.

        Raises:
            MkdDataError: a segment, or an unpacked row, that 2 * size does not divide.
        """
        if size == 1:
            return self
        places = dual_chunk_places(self.bounds, rank, size).to(self.tokens.device)
        parts = {name: value.index_select(1, places) for name, value in self._per_token().items()}
        return replace(self, **parts, others=tuple(other.cp_slice(places, rank, size) for other in self.others))

    def to_device(self) -> "KDBatch":
        """The same on the current device."""
        # "cuda" is the CPU where mkd.cpu is active.
        moved = {name: value.to("cuda", non_blocking=True) for name, value in self._per_token().items()}
        packed = self.packed
        if packed is not None:
            bounds = packed.cu_seqlens_q_padded.to("cuda", non_blocking=True)
            packed = replace(packed, **dict.fromkeys(_BOUNDS, bounds))
        others = tuple(replace(other, batch=other.batch.to_device()) for other in self.others)
        return replace(self, **moved, packed=packed, others=others)

    def on_rank(self, cp: dist.ProcessGroup) -> "KDBatch":
        """This rank's part of a whole microbatch, on its device."""
        return self.cp_slice(cp.rank(), cp.size()).to_device()

    def content_hash(self) -> Tensor:
        """[1] int64 on the batch's device: differs, but for chance, when any token, label, mask or bound differs."""
        parts = [t.flatten().long() for t in (self.tokens, self.labels, self.ce_mask, self.kd_mask)]
        if self.packed is not None:
            parts.append(self.packed.cu_seqlens_q_padded.long())
        for other in self.others:
            parts += [other.student_chunk.flatten(), other.chunk.flatten(), other.batch.content_hash()]
        joined = torch.cat(parts)
        place = torch.arange(1, joined.numel() + 1, device=joined.device)
        return ((joined + 1) * (place * 2654435761 % 2147483647)).sum().view(1)


@dataclass(frozen=True)
class TeacherTokens:
    """A microbatch in the tokens of a teacher with another tokenizer, and how the two align.

    Its rows have the same texts in the same order; their number of tokens is their own. Chunks are runs of tokens of
    both sides that cover the same characters and on which the divergence is taken. They are numbered over the whole
    microbatch, alike on all context-parallel ranks. The chunk of a place is that of its label.
    """

    batch: KDBatch
    """[b, t/cp] tokens, and what belongs to them."""
    student_chunk: Tensor
    """[b, s/cp] int64, of each place of the student's rows; -1 for none. On the host, as the next three."""
    student_first: Tensor
    """[b, s/cp] bool: whether the place predicts the first token of its chunk."""
    chunk: Tensor
    """[b, t/cp] int64"""
    first: Tensor
    """[b, t/cp] bool"""
    chunks: int
    """Of the whole microbatch, on every rank."""
    chunk_text: Tensor | None = None
    """[chunks] int64, the number of the text that each chunk lies in, on the host; see `KDBatch.with_texts`."""

    @classmethod
    def from_sample(cls, sample: Mapping[str, Any], packed: bool) -> "TeacherTokens":
        """See `KDBatch.from_sample`; packed microbatches have one row."""
        before = torch.cumsum(sample["chunks"], 0) - sample["chunks"]
        numbers = [
            torch.where(chunk >= 0, chunk + before[:, None], -1) for chunk in (sample["student_chunk"], sample["chunk"])
        ]
        firsts = [_starts(chunk) for chunk in numbers]
        if packed:
            numbers, firsts = ([part.reshape(1, -1) for part in parts] for parts in (numbers, firsts))
        batch = KDBatch.from_sample(sample, None)
        return cls(batch, numbers[0], firsts[0], numbers[1], firsts[1], int(sample["chunks"].sum()))

    def cp_slice(self, places: Tensor, rank: int, size: int) -> "TeacherTokens":
        """What a context-parallel rank holds; `places` are those of the student's tokens that it has."""
        own = dual_chunk_places(self.batch.bounds, rank, size)
        return replace(
            self,
            batch=self.batch.cp_slice(rank, size),
            student_chunk=self.student_chunk.index_select(1, places),
            student_first=self.student_first.index_select(1, places),
            chunk=self.chunk.index_select(1, own),
            first=self.first.index_select(1, own),
        )


def _starts(chunk: Tensor) -> Tensor:
    """[b, s] bool: where a chunk begins in whole rows of chunk numbers."""
    before = torch.nn.functional.pad(chunk[:, :-1], (1, 0), value=-1)
    return (chunk >= 0) & (chunk != before)


def segment_key(tokens: Tensor) -> bytes:
    """16 bytes that say which token ids these are ([n] integers): BLAKE2b over them as little-endian int32."""
    return hashlib.blake2b(tokens.cpu().numpy().astype("<i4").tobytes(), digest_size=16).digest()


def _join_rows(sample: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
    """Bounds of the padded segments of all rows behind each other, and each segment's length without its padding."""
    row_length = sample["tokens"].shape[1]
    bounds, lengths = [0], []
    for row, (padded, real) in enumerate(
        zip(sample["cu_seqlens_padded"].tolist(), sample["cu_seqlens"].tolist(), strict=True)
    ):
        if padded[0] != 0 or padded[-1] != row_length or len(padded) != len(real):
            raise MkdDataError(f"a packed row of {row_length} tokens has the segment bounds {padded}")
        for (start, end), (text_start, text_end) in zip(pairwise(padded), pairwise(real), strict=True):
            if not 0 <= text_end - text_start <= end - start:
                raise MkdDataError(
                    f"a packed segment of {text_end - text_start} tokens has {end - start} places in its row"
                )
            if end > start:
                bounds.append(row * row_length + end)
                lengths.append(text_end - text_start)
    return bounds, lengths


_BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def _packed_seq_params(bounds: Sequence[int]) -> PackedSeqParams:
    """Megatron's description of segments.

    Padding stands behind the text of its own segment, where causal attention cannot see it from the text. So the padded
    bounds are given as the real ones too, and the attention kernels need not know of padding between segments.
    max_seqlen is exact: megatron's rotary embeddings take a table as long as the row for positions that do not begin
    anew in each segment.
    """
    longest = max(end - start for start, end in pairwise(bounds))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        **dict.fromkeys(_BOUNDS, cu_seqlens),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
    )


def draw(
    iterator: Iterator[Mapping[str, Tensor]],
    count: int,
    true_vocab: int,
    micro_batch_size: int | None = None,
    length_multiple: int | None = None,
) -> list[KDBatch]:
    """The next `count` microbatches, whole and on the host.

    Args:
        iterator: collated samples, see `KDBatch.from_sample`.
        count: microbatches.
        true_vocab: see `KDBatch.from_sample`.
        micro_batch_size: rows that each must have; None for any.
        length_multiple: cut unpacked rows behind the longest text of each microbatch, to a multiple of it; None leaves
            them whole.

    Raises:
        MkdDataError: see `KDBatch.from_sample`; or a microbatch has another number of rows.
    """
    batches = []
    for number in range(count):
        sample = next(iterator)
        rows = sample["tokens"].shape[0]
        if micro_batch_size is not None and rows != micro_batch_size:
            raise MkdDataError(
                f"the data loader gives {rows} samples at a time, the schedule expects {micro_batch_size}: correct "
                "--micro-batch-size or --eval-micro-batch-size"
            )
        if length_multiple is not None:
            sample = _without_padding(sample, length_multiple)
        batches.append(replace(KDBatch.from_sample(sample, true_vocab), number=number))
    return batches


def _without_padding(sample: Mapping[str, Any], length_multiple: int) -> dict[str, Any]:
    """An unpacked sample cut behind its longest text, on every side by itself."""
    if "length" not in sample:
        return dict(sample)

    def longest(side: Mapping[str, Any]) -> int:
        return -(-int(side["length"].max()) // length_multiple) * length_multiple

    def cut(side: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[:, : longest(side)] if value.dim() > 1 else value for name, value in side.items()}

    others = [
        {**cut(other), "student_chunk": other["student_chunk"][:, : longest(sample)]}
        for other in sample.get(OTHERS, ())
    ]
    return {**cut({name: value for name, value in sample.items() if name != OTHERS}), OTHERS: others}


def check_same_batch(batch: KDBatch, *groups: dist.ProcessGroup) -> None:
    """Raise MkdDataError unless every rank of one model replica has read the same microbatch.

    Each rank reads the data itself. Ranks that read different tokens would train on nonsense with a plausible loss.

    Args:
        batch: the whole microbatch.
        groups: together they connect all ranks of this replica: its tensor- and pipeline-parallel ranks, and its
            context-parallel ranks. Launches two all-reduces of 8 bytes in each.
    """
    low = batch.content_hash().to("cuda")
    high = low.clone()
    for group in groups:
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if low.item() != high.item():
        raise MkdDataError(
            "ranks of one model replica read different tokens: make --data-path and --data-cache-path show the same "
            "files on every node, and remove a stale index cache"
        )
