"""Aligned samples: one text in the tokens of the student and of k - 1 teachers with other tokenizers, and their store.

Like a chat file, the data is tokenized once, whole, before the first step: rows are planned with the lengths in all
views. Documents of PREFIX.bin are decoded to the text of their tokens, and tokenized again for every view.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mkd.data.sources.chat import SUPERVISED
from mkd.data.sources.chat_versions import FACTS_VERSION
from mkd.data.sources.parallel import map_in_order
from mkd.data.sources.stores import (
    MappedSamples,
    cache_base,
    chat_batches,
    chat_files,
    file_of,
    first_records,
    is_chat_file,
    is_stored,
    json_of_facts,
    named_records,
    new_files,
    part_of,
    read_facts,
    workers_for,
)
from mkd.data.sources.text import BROKEN, BadRecords, RawBatch
from mkd.data.sources.token_files import TokenFile
from mkd.errors import MkdDataError
from mkd.utils.progress import ByteProgress

_FORMAT = 2
"""Version of the stored format; increased when the content stored for the same data changes."""
_BATCH_TOKENS = 1 << 18
"""Tokens of the documents that are sent to a worker process together."""
_PROBED_TOKENS = 1 << 14
"""Tokens of an indexed file that are checked before the job starts."""


@dataclass(frozen=True)
class TeacherText:
    """A text in the tokens of one teacher, aligned with the student's by text chunks of the same characters."""

    ids: np.ndarray
    """[m] integers."""
    targets: np.ndarray
    """[m] bool, True for targets."""
    chunk: np.ndarray
    """[m] int32 chunk of each token, counted from 0 along the text; -1 for tokens without a counterpart."""
    student_chunk: np.ndarray
    """[n] int32 chunk of each of the student's tokens, likewise."""


@dataclass(frozen=True)
class AlignedSample:
    """One text in all views."""

    ids: np.ndarray
    """[n] integers, the student's tokens."""
    targets: np.ndarray
    """[n] bool, True for targets."""
    views: tuple[TeacherText, ...]
    """One for each teacher with another tokenizer."""

    @property
    def lengths(self) -> list[int]:
        """Tokens in each view, the student's first."""
        return [len(self.ids), *(len(view.ids) for view in self.views)]

    def words(self) -> np.ndarray:
        """The sample as uint32 words, the stored form; `of_words` is the inverse."""
        parts = [_with_bits(self.ids, self.targets)]
        for view in self.views:
            chunks = [chunk.astype(np.int32).view(np.uint32) for chunk in (view.student_chunk, view.chunk)]
            parts += [_with_bits(view.ids, view.targets), *chunks]
        return np.concatenate(parts)

    @classmethod
    def of_words(cls, words: np.ndarray, lengths: Sequence[int]) -> "AlignedSample":
        """Restore a sample from its `words` and the number of tokens in each view."""
        n, *rest = lengths
        parts = iter(np.split(words, np.cumsum([n, *(size for m in rest for size in (m, n, m))])[:-1]))
        ids, targets = _without_bits(next(parts))
        views = []
        for _ in rest:
            view_ids, view_targets = _without_bits(next(parts))
            student_chunk, chunk = next(parts).view(np.int32), next(parts).view(np.int32)
            views.append(TeacherText(view_ids, view_targets, chunk, student_chunk))
        return cls(ids, targets, tuple(views))


def _with_bits(ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.where(targets, SUPERVISED, np.uint32(0)) | ids.astype(np.uint32)


def _without_bits(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (stored & ~SUPERVISED).astype(np.int64), (stored & SUPERVISED) != 0


@dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents of an indexed file."""

    prefix: str
    documents: list[np.ndarray]
    """Token ids of each document."""

    @property
    def size(self) -> int:
        """Bytes read from the file for this batch."""
        return sum(document.nbytes for document in self.documents)


@dataclass
class AlignedBatch:
    """Result of aligning a batch of lines or documents."""

    size: int = 0
    """Bytes of the batch."""
    samples: list[AlignedSample] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)
    """Reason -> samples left out."""
    changed: int = 0
    """Documents that the student's tokenizer now cuts into other tokens than were stored."""
    spelled_out: int = 0
    """Documents with special tokens of the student, not at the ends of texts, that a teacher's tokenizer splits into
    ordinary text."""
    bad: BadRecords = field(default_factory=BadRecords)


class BatchAligner(Protocol):
    """Tokenizes texts for all views and aligns them; pickled to worker processes."""

    folders: tuple[str, ...]
    """Folders of the tokenizers, the student's first."""
    fingerprint: str
    """Changes whenever a token or an alignment may change."""

    def __call__(self, batch: RawBatch | DocumentBatch) -> AlignedBatch:
        """Align lines of a chat file, or documents. Raises MkdDataError that names the line or document."""
        ...


@dataclass(frozen=True)
class AlignedFacts:
    """Statistics of aligned data. Lists have one entry per view, the student's first."""

    samples: int
    tokens: list[int]
    supervised: list[int]
    max_token_id: list[int]
    chunks: list[int]
    """Text chunks with each teacher."""
    covered: list[int]
    """Student tokens in a chunk, for each teacher."""
    skipped: dict[str, int]
    """Reason -> samples left out."""
    changed: int
    """See `AlignedBatch`."""
    spelled_out: int
    """See `AlignedBatch`."""
    version: int = 1
    """See `mkd.data.sources.chat_versions.FACTS_VERSION`."""
    bad: list[str] = field(default_factory=list)
    """Messages about the first broken records."""

    def __str__(self) -> str:
        text = f"{self.samples} samples, {self.tokens[0]} tokens of the student, {self.supervised[0]} of them with CE"
        for number, (chunks, covered) in enumerate(zip(self.chunks, self.covered, strict=True), start=1):
            text += f"; {self.tokens[number]} of a teacher, in {chunks} chunks with {covered} of the student's"
        if self.changed:
            text += f"; {self.changed} documents are cut into other tokens than were stored"
            if 2 * self.changed > self.samples:
                text += " (was the data made with this tokenizer?)"
        if self.spelled_out:
            text += f"; in {self.spelled_out} documents a teacher's tokenizer splits special tokens of the student"
        text += "".join(f"; left out {count} {reason}" for reason, count in self.skipped.items() if count)
        return text + named_records(self.skipped, self.bad)


class _Counts:
    """Sums over all samples."""

    def __init__(self, views: int) -> None:
        self.samples = self.changed = self.spelled_out = 0
        self.tokens, self.supervised, self.largest = [0] * views, [0] * views, [0] * views
        self.chunks, self.covered = [0] * (views - 1), [0] * (views - 1)
        self.skipped: Counter = Counter()
        self.bad = BadRecords()

    def add(self, sample: AlignedSample) -> None:
        self.samples += 1
        for number, tokens in enumerate((sample, *sample.views)):
            self.tokens[number] += len(tokens.ids)
            self.supervised[number] += int(tokens.targets.sum())
            self.largest[number] = max(self.largest[number], int(tokens.ids.max(initial=0)))
        for number, view in enumerate(sample.views):
            self.chunks[number] += int(view.chunk.max(initial=-1)) + 1
            self.covered[number] += int((view.student_chunk >= 0).sum())

    def facts(self) -> AlignedFacts:
        return AlignedFacts(
            samples=self.samples,
            tokens=self.tokens,
            supervised=self.supervised,
            max_token_id=self.largest,
            chunks=self.chunks,
            covered=self.covered,
            skipped=dict(+self.skipped) | ({BROKEN: self.bad.count} if self.bad.count else {}),
            changed=self.changed,
            spelled_out=self.spelled_out,
            version=FACTS_VERSION,
            bad=self.bad.first,
        )


class AlignedStore:
    """Samples that `tokenize_aligned` has written: the store with k views beside ChatStore and DocumentStore."""

    def __init__(
        self, base: Path, share: tuple[float, float], views: int, vocabularies: Sequence[int | None] = ()
    ) -> None:
        """Open the samples between two shares (0 to 1).

        Args:
            base: path from `aligned_base`.
            share: first and last share.
            views: number of views.
            vocabularies: size of each view's vocabulary: ids from there up are errors.
        """
        self.facts = read_facts(base, AlignedFacts)
        self._vocabularies = tuple(vocabularies)
        self._files = files = MappedSamples(base, self.facts.samples, "pairs")
        part = part_of(self.facts.samples, share)
        self._bounds = files.bounds[part.start : part.stop + 1]
        self.lengths = _lengths(base, views, np.diff(files.bounds))[part]
        self._words, self._first = files.words, part.start

    def read(self, sample: int) -> AlignedSample:
        self._files.check()
        begin, end = self._bounds[sample : sample + 2].tolist()
        found = AlignedSample.of_words(np.asarray(self._words[begin:end]), self.lengths[sample].tolist())
        for view, vocabulary in zip((found, *found.views), self._vocabularies, strict=False):
            self._files.check_ids(view.ids, vocabulary, self._first + sample)
        return found


def _lengths(base: Path, views: int, words: np.ndarray) -> np.ndarray:
    """[samples, views] tokens of each sample in each view.

    Raises:
        MkdDataError: they do not give the samples' numbers of words, [samples].
    """
    file = file_of(base, "lengths")
    lengths = np.fromfile(file, np.int64) if file.is_file() else np.zeros(0, np.int64)
    if len(lengths) == views * len(words):
        lengths = lengths.reshape(-1, views)
        stored = lengths[:, 0] * views + 2 * lengths[:, 1:].sum(axis=1)  # see `AlignedSample.words`
        if (lengths >= 0).all() and (stored == words).all():
            return lengths
    raise MkdDataError(f"{file} in the data cache is damaged: delete {base}.*")


def aligned_base(name: str, encoder: BatchAligner, cache: str | None) -> Path:
    """Path in the data cache of the aligned samples of a chat file or an indexed file, without suffix.

    Args:
        name: name in --data-path.
        encoder: tokenizers, templates and alignment.
        cache: --data-cache-path; None for a folder beside the file.
    """
    return cache_base(name, _main_files(name), f"pairs {_FORMAT} {encoder.fingerprint}", cache, "pairs")


def _main_files(name: str) -> list[str]:
    return chat_files(name) if is_chat_file(name) else [f"{name}.bin"]


def probe_aligned(name: str, encoder: BatchAligner) -> list[int]:
    """Tokens of the first samples in each view, the student's first. Raises MkdDataError if they are invalid."""
    if is_chat_file(name):
        first: RawBatch | DocumentBatch = first_records(name)
    else:
        first = next(_batches(name, _PROBED_TOKENS, None))
    lengths = [sample.lengths for sample in encoder(first).samples]
    return np.sum(lengths, axis=0, dtype=np.int64).tolist() if lengths else [0] * len(encoder.folders)


def tokenize_aligned(
    name: str, encoder: BatchAligner, base: Path, log: Callable[[str], None], true_vocab: int | None = None
) -> None:
    """Tokenize and align all of the data, unless the cache holds the result.

    Args:
        name: chat data, or PREFIX of .bin and .idx.
        encoder: tokenizers, templates and alignment.
        base: path from `aligned_base`.
        log: called with a line before the work, which may take minutes.
        true_vocab: size of the student's vocabulary, for the ids in an indexed file.

    Raises:
        MkdDataError: an invalid line or document (named); no sample can be used; the cache cannot be written.
    """
    if is_stored(name, base, AlignedFacts):
        return
    files = _main_files(name)
    log(f"{name}: tokenizing for {len(encoder.folders)} tokenizers, once")
    bounds, counts = [0], _Counts(len(encoder.folders))
    progress = ByteProgress(f"{name}: tokenizing", sum(Path(file).stat().st_size for file in files))
    with new_files(name, base, ("pairs", "bounds", "lengths", "json")) as partial:
        with partial["pairs"].open("wb") as words, partial["lengths"].open("wb") as lengths, progress:
            batches = _batches(name, _BATCH_TOKENS, true_vocab)
            for batch in map_in_order(encoder, batches, workers_for(files), f"{name} has too long records"):
                progress.advance(batch.size)
                counts.skipped.update(batch.skipped)
                counts.bad.merge(batch.bad)
                counts.changed += batch.changed
                counts.spelled_out += batch.spelled_out
                for sample in batch.samples:
                    counts.add(sample)
                    written = sample.words()
                    written.tofile(words)
                    np.array(sample.lengths, dtype=np.int64).tofile(lengths)
                    bounds.append(bounds[-1] + len(written))
        facts = counts.facts()
        if facts.samples == 0:
            raise MkdDataError(f"--data-path {name}: no sample can be used ({facts})")
        np.array(bounds, dtype=np.int64).tofile(partial["bounds"])
        partial["json"].write_text(json_of_facts(facts))


def _batches(name: str, tokens: int, true_vocab: int | None) -> Iterator[RawBatch | DocumentBatch]:
    if is_chat_file(name):
        yield from chat_batches(name)
        return
    documents = TokenFile(name, true_vocab)
    held, size = [], 0
    for number in range(len(documents)):
        held.append(np.array(documents[number]))
        size += len(held[-1])
        if size >= tokens:
            yield DocumentBatch(name, held)
            held, size = [], 0
    if held:
        yield DocumentBatch(name, held)
