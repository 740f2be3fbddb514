"""Answers that another tool has collected, into a teacher cache: rows with the columns of axolotl's KD data sets."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mkd.data.batch import segment_hash
from mkd.errors import MkdDataError
from mkd.teacher.cache.record_format import TokenRows
from mkd.teacher.cache.store import CacheMeta
from mkd.teacher.cache.writer import StoreWriter

IDS, LOG_PROBS = "target_token_ids", "target_logprobs"
Alignment = Literal["token", "next"]
"""What row t of the answers is about: token t itself, or the one after it."""
LEAST = -1e8
"""A log-probability from here down stands for an empty place: -inf, or the -1e9 of padding."""
_ABSENT = -60.0
"""ln of the probability of an id that only fills a row up."""
MOST = 1.02
"""Sum of a row's probabilities above which its numbers are no log-probabilities; rounding to bf16 stays below."""
PROBED = 64
"""Texts that are looked at before anything is written."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record is, and its columns; of a .jsonl or a .parquet file.

    Raises:
        MkdDataError: it is missing, of another kind, or not what its name says; or pyarrow is not installed.
    """
    if not path.is_file():
        raise MkdDataError(f"{path} does not exist")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    if path.suffix not in (".jsonl", ".json"):
        raise MkdDataError(f"{path} is neither .jsonl nor .parquet")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise MkdDataError(f"{path}, line {number} is not JSON ({error})") from error
            if not isinstance(record, dict):
                raise MkdDataError(f"{path}, line {number} is no JSON object")
            yield f"{path}, line {number}", record


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MkdDataError(f"{path}: reading parquet needs pyarrow (pip install pyarrow); JSON lines do not") from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", record
    except (ArrowException, OSError) as error:
        raise MkdDataError(f"{path} cannot be read as parquet ({error})") from error


@dataclass(frozen=True)
class Answered:
    """A text, and what a teacher says of each of its tokens."""

    where: str
    ids: np.ndarray
    """[n] int64, the text."""
    supervised: np.ndarray
    """[n] bool: which tokens are to be learned."""
    top_ids: list[np.ndarray]
    """Of each token: the ids that the teacher's row has. Row t is about token t itself, as `Alignment` "token"."""
    log_p: list[np.ndarray]
    """Of each token: their log-probabilities, fp32."""

    @classmethod
    def of(cls, where: str, record: dict[str, Any], align: Alignment) -> "Answered":
        """From the columns input_ids, labels (-100 where nothing is learned; optional), target_token_ids and
        target_logprobs.

        Raises:
            MkdDataError: a column is missing, or they do not fit each other.
        """
        for name in ("input_ids", IDS, LOG_PROBS):
            if record.get(name) is None:
                raise MkdDataError(f"{where} has no column {name}: it has {', '.join(sorted(record))}")
        ids = np.asarray(record["input_ids"], dtype=np.int64)
        labels = record.get("labels")
        supervised = np.ones(len(ids), dtype=bool) if labels is None else np.asarray(labels) != -100
        rows = [
            (np.asarray(row, dtype=np.int64), np.asarray(values, dtype=np.float32))
            for row, values in zip(record[IDS] or [], record[LOG_PROBS] or [], strict=False)
        ]
        if not len(ids) == len(supervised) == len(record[IDS]) == len(record[LOG_PROBS]):
            raise MkdDataError(
                f"{where}: input_ids has {len(ids)} entries, labels {len(supervised)}, {IDS} {len(record[IDS])}, "
                f"{LOG_PROBS} {len(record[LOG_PROBS])}; all must be of one length"
            )
        for row, values in rows:
            if len(row) != len(values):
                raise MkdDataError(f"{where}: a row has {len(row)} ids and {len(values)} log-probabilities")
            if np.isnan(values).any() or np.exp(values.astype(np.float64)).sum() > MOST:
                raise MkdDataError(
                    f"{where}: {LOG_PROBS} has the row {values[:8].tolist()}, which are no log-probabilities (natural "
                    "logarithms, whose probabilities add up to at most 1)"
                )
        if align == "next":  # the first token is nobody's
            rows = [(np.empty(0, np.int64), np.empty(0, np.float32)), *rows[:-1]]
        kept = [(row[values > LEAST], values[values > LEAST]) for row, values in rows]
        return cls(where, ids, supervised, [row for row, _ in kept], [values for _, values in kept])

    @property
    def wanted(self) -> list[int]:
        """The tokens that are learned; of the first one nobody says anything."""
        return [t for t in range(1, len(self.ids)) if self.supervised[t]]

    @property
    def is_complete(self) -> bool:
        """Whether there is something to learn, and an answer to all of it."""
        return bool(self.wanted) and all(len(self.top_ids[t]) for t in self.wanted)

    def hits(self, shift: int) -> list[bool]:
        """Of the tokens that are learned: whether the teacher's row that is `shift` places later names the token."""
        places = [t for t in self.wanted if 1 <= t + shift < len(self.ids)]
        return [bool((self.top_ids[t + shift] == self.ids[t]).any()) for t in places]


@dataclass(frozen=True)
class ImportPlan:
    """How answers become records."""

    top_k: int
    vocab: int
    has_tail: bool

    @classmethod
    def of(cls, texts: Sequence[Answered], top_k: int | None, vocab: int) -> "ImportPlan":
        """From some texts.

        Args:
            texts: in which something is learned.
            top_k: None: as many ids as the shortest of their rows has.
            vocab: tokens that exist.

        Raises:
            MkdDataError: the rows fit the text better one place earlier or later; or there are none.
        """
        here, later, earlier = (float(np.mean([hit for text in texts for hit in text.hits(s)])) for s in (0, 1, -1))
        if max(later, earlier) > here + 0.1:
            raise MkdDataError(
                f"{texts[0].where} and after it: rows of {IDS} name their own token in {here:.0%} of all places, but "
                f"the one {'before' if later > earlier else 'after'} it in {max(later, earlier):.0%}: "
                "--align says what row t is about, token t itself (token) or the one after it (next)"
            )
        rows = [row for text in texts for t in text.wanted if len(row := text.log_p[t])]
        if not rows:
            raise MkdDataError(f"{texts[0].where} and after it: no supervised token has answers")
        sums = np.array([np.exp(row.astype(np.float64)).sum() for row in rows])
        return cls(top_k or min(map(len, rows)), vocab, has_tail=bool((np.abs(sums - 1) > 1e-3).any()))

    def token_rows(self, text: Answered) -> tuple[bytes, TokenRows]:
        """Key and rows of a text, a row for each token but the last one: about the token after it.

        Raises:
            MkdDataError: a supervised token has fewer answers than `top_k`, or an id is not in the vocabulary.
        """
        count, k = len(text.ids) - 1, self.top_k
        ids = np.tile(np.arange(k, dtype=np.int32), (count, 1))
        logits = np.full((count, k), _ABSENT, dtype=np.float32)
        tail, label = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
        for t in text.wanted:
            row, log_p = text.top_ids[t], text.log_p[t]
            if len(row) < k:
                raise MkdDataError(
                    f"{text.where}: token {t} has {len(row)} answers, others have {k}: give --top-k {len(row)}"
                )
            if row.min() < 0 or row.max() >= self.vocab:
                raise MkdDataError(f"{text.where}: {IDS} has id {row.max()}, the vocabulary has {self.vocab} tokens")
            order = np.argsort(-log_p, kind="stable")[:k]
            ids[t - 1], logits[t - 1] = row[order], log_p[order]
            rest = -np.expm1(min(np.logaddexp.reduce(log_p[order].astype(np.float64)), 0.0))
            tail[t - 1] = np.log(max(rest, np.exp(_ABSENT)))
            own = log_p[row == text.ids[t]]
            # Of a token that is not named no more is known than that it is less likely than those that are.
            label[t - 1] = own[0] if len(own) else min(tail[t - 1], log_p[order].min())
        lse = np.zeros((count, 1), dtype=np.float32)
        return segment_hash(torch.from_numpy(text.ids[:-1])), TokenRows(ids, logits, lse, label, tail[:, None])


@dataclass
class Imported:
    """What was done with the texts of some files."""

    stored: int = 0
    incomplete: int = 0
    """Left out: nothing is learned in them, or a token that is learned has no answer."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The tool's flags."""

    out: Path
    files: tuple[Path, ...]
    teacher: str
    """A name for whoever gave the answers."""
    tokenizer: str | None
    """Hash of the tokenizer."""
    vocab: int
    top_k: int | None = None
    lossless: bool = False
    align: Alignment = "token"


def import_answers(options: ImportOptions) -> tuple[CacheMeta, Imported]:
    """Write the answers of some files into a cache, which may be there already.

    Raises:
        MkdDataError: a file cannot be read, or does not hold what it should; or nothing could be stored.
        MkdCacheError: the folder holds something else, or answers are not finite.
    """

    def texts() -> Iterator[Answered]:
        for file in options.files:
            for where, record in read_records(file):
                yield Answered.of(where, record, options.align)

    first = list(islice((text for text in texts() if text.wanted), PROBED))
    if not first:
        raise MkdDataError(f"{options.files[0]}: nothing is learned in any text (labels are -100 throughout)")
    plan = ImportPlan.of(first, options.top_k, options.vocab)
    meta = CacheMeta(
        teacher=options.teacher,
        tokenizer=options.tokenizer,
        true_vocab=options.vocab,
        top_k=plan.top_k,
        values="fp32" if options.lossless else "log12",
        teacher_dtype="imported",
        labels_only=True,
        has_tail=plan.has_tail,
    )
    writer, done = StoreWriter(options.out, meta), Imported()
    for text in texts():
        if text.is_complete:
            writer.add(*plan.token_rows(text))
            done.stored += 1
        else:
            done.incomplete += 1
    writer.flush()
    if not done.stored:
        raise MkdDataError(f"{options.files[0]}: no text has answers to all of its supervised tokens")
    return meta, done
