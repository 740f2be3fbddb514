"""Imports targets that another tool has collected: records with the columns of axolotl's KD data sets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mkd.data.segments import segment_hash
from mkd.errors import MkdDataError
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.record_format import TokenTargets
from mkd.teacher.cache.writer import StoreWriter
from mkd.utils.json_files import MOST_BYTES, parse_json

IDS, LOG_PROBS = "target_token_ids", "target_logprobs"
Alignment = Literal["token", "next"]
"""Entry t of the targets is for token t itself ("token"), or for the token after it ("next")."""
EMPTY_LOG_PROB = -1e8
"""Log-probabilities at or below this stand for an empty slot: -inf, or the -1e9 of padding."""
_FILLER_LOG_PROB = -60.0
"""Log-probability of filler ids."""
MAX_SUM = 1.02
"""Largest sum of a token's probabilities; above it they are not log-probabilities. Rounding to bf16 stays below."""
PROBED = 64
"""Texts that are checked before anything is written."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields location (for messages) and columns of each record of a .jsonl or .parquet file.

    Raises:
        MkdDataError: the file is missing, of another kind, or damaged; or pyarrow is not installed.
    """
    if not path.is_file():
        raise MkdDataError(f"{path} does not exist")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    if path.suffix not in (".jsonl", ".json"):
        raise MkdDataError(f"{path} is neither .jsonl nor .parquet")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            if not line.strip():
                continue
            try:
                record = parse_json(line.decode())
            except ValueError as error:  # also bytes that are not UTF-8, and a line that is too long
                raise MkdDataError(f"{path}, line {number} is not JSON ({error})") from error
            if not isinstance(record, dict):
                raise MkdDataError(f"{path}, line {number} is not a JSON object")
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
class ImportedText:
    """A text and the targets of its tokens."""

    where: str
    """Location, for messages."""
    ids: np.ndarray
    """[n] int64 token ids of the text."""
    supervised: np.ndarray
    """[n] bool, supervised tokens."""
    top_ids: list[np.ndarray]
    """Per token, the ids of its targets. Entry t is for token t itself, as with `Alignment` "token"."""
    log_p: list[np.ndarray]
    """Per token, their log-probabilities, fp32."""

    @classmethod
    def of(cls, where: str, record: dict[str, Any], align: Alignment) -> "ImportedText":
        """Read the columns input_ids, labels (-100 for tokens that are not supervised; optional), target_token_ids and
        target_logprobs.

        Raises:
            MkdDataError: a column is missing, or their lengths or values are invalid.
        """
        for name in ("input_ids", IDS, LOG_PROBS):
            if record.get(name) is None:
                raise MkdDataError(f"{where} has no column {name}: it has {', '.join(sorted(record))}")
            if not isinstance(record[name], list):
                raise MkdDataError(f"{where}: {name} is a {type(record[name]).__name__}, not a list")
        ids = _integers(record["input_ids"], f"{where}: input_ids")
        labels = record.get("labels")
        given = ids if labels is None else _integers(labels, f"{where}: labels")
        supervised = np.ones(len(ids), dtype=bool) if labels is None else given != -100
        targets = [
            (_integers(top, f"{where}: {IDS}"), _numbers(values, f"{where}: {LOG_PROBS}"))
            for top, values in zip(record[IDS], record[LOG_PROBS], strict=False)
        ]
        if not len(ids) == len(supervised) == len(record[IDS]) == len(record[LOG_PROBS]):
            raise MkdDataError(
                f"{where}: input_ids has {len(ids)} entries, labels {len(supervised)}, {IDS} {len(record[IDS])}, "
                f"{LOG_PROBS} {len(record[LOG_PROBS])}; all must have the same length"
            )
        for top, values in targets:
            if len(top) != len(values):
                raise MkdDataError(f"{where}: a token has {len(top)} ids and {len(values)} log-probabilities")
            if np.isnan(values).any() or np.exp(values.astype(np.float64)).sum() > MAX_SUM:
                raise MkdDataError(
                    f"{where}: {LOG_PROBS} has the list {values[:8].tolist()}, which are not log-probabilities "
                    "(natural logarithms, whose probabilities add up to at most 1)"
                )
        if align == "next":  # the first token has no targets
            targets = [(np.empty(0, np.int64), np.empty(0, np.float32)), *targets[:-1]]
        kept = [(top[values > EMPTY_LOG_PROB], values[values > EMPTY_LOG_PROB]) for top, values in targets]
        return cls(where, ids, supervised, [top for top, _ in kept], [values for _, values in kept])

    @property
    def needed(self) -> list[int]:
        """Indices of the supervised tokens that need targets; the first token of a text never has any."""
        return [t for t in range(1, len(self.ids)) if self.supervised[t]]

    @property
    def is_complete(self) -> bool:
        """True if the text has supervised tokens, and targets for all of them."""
        return bool(self.needed) and all(len(self.top_ids[t]) for t in self.needed)

    def hits(self, shift: int) -> list[bool]:
        """Per supervised token, True if the targets `shift` positions later contain the token."""
        positions = [t for t in self.needed if 1 <= t + shift < len(self.ids)]
        return [bool((self.top_ids[t + shift] == self.ids[t]).any()) for t in positions]


def _integers(values: Any, what: str) -> np.ndarray:
    """[n] int64. Raises MkdDataError for anything but a list of integers."""
    found = _array(values, what)
    if found.size and found.dtype.kind != "i":
        raise MkdDataError(f"{what} has a list of {found.dtype}, not of integers")
    return found.astype(np.int64)


def _numbers(values: Any, what: str) -> np.ndarray:
    """[n] fp32. Raises MkdDataError for anything but a list of numbers."""
    found = _array(values, what)
    if found.size and found.dtype.kind not in "if":
        raise MkdDataError(f"{what} has a list of {found.dtype}, not of numbers")
    return found.astype(np.float32)


def _array(values: Any, what: str) -> np.ndarray:
    """A list without lists in it. Raises MkdDataError for another value."""
    try:
        found = np.asarray([] if values is None else values)
    except (ValueError, OverflowError) as error:
        raise MkdDataError(f"{what} has a list that is not one of numbers ({error})") from None
    if found.ndim != 1:
        raise MkdDataError(f"{what} has {str(values)[:40]!r} where a list of numbers is needed")
    return found


@dataclass(frozen=True)
class ImportPlan:
    """Conversion of imported targets to records."""

    top_k: int
    vocab: int
    has_tail: bool

    @classmethod
    def of(cls, texts: Sequence[ImportedText], top_k: int | None, vocab: int) -> "ImportPlan":
        """Derive the plan from the first texts.

        Args:
            texts: texts with supervised tokens.
            top_k: ids per record; None for the smallest number that a token of `texts` has.
            vocab: vocabulary size without padding.

        Raises:
            MkdDataError: the targets match the text better one position earlier or later, or there are none.
        """
        here, later, earlier = (float(np.mean([hit for text in texts for hit in text.hits(s)])) for s in (0, 1, -1))
        if max(later, earlier) > here + 0.1:
            raise MkdDataError(
                f"{texts[0].where} and after it: lists of {IDS} contain their own token at {here:.0%} of positions, "
                f"but the one {'before' if later > earlier else 'after'} it at {max(later, earlier):.0%}: set --align "
                "to the token that list t is for, token t itself (token) or the one after it (next)"
            )
        targets = [log_p for text in texts for t in text.needed if len(log_p := text.log_p[t])]
        if not targets:
            raise MkdDataError(f"{texts[0].where} and after it: no supervised token has targets")
        sums = np.array([np.exp(log_p.astype(np.float64)).sum() for log_p in targets])
        return cls(top_k or min(map(len, targets)), vocab, has_tail=bool((np.abs(sums - 1) > 1e-3).any()))

    def token_targets(self, text: ImportedText) -> tuple[bytes, TokenTargets]:
        """Key and targets of a text: for each token except the last, those of the token after it.

        Raises:
            MkdDataError: a supervised token has fewer ids than `top_k`, or an id is not in the vocabulary.
        """
        count, k = len(text.ids) - 1, self.top_k
        ids = np.tile(np.arange(k, dtype=np.int32), (count, 1))
        logits = np.full((count, k), _FILLER_LOG_PROB, dtype=np.float32)
        tail, label = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
        for t in text.needed:
            top, log_p = text.top_ids[t], text.log_p[t]
            if len(top) < k:
                raise MkdDataError(
                    f"{text.where}: token {t} has {len(top)} targets, others have {k}: give --top-k {len(top)}"
                )
            if top.min() < 0 or top.max() >= self.vocab:
                wrong = top.min() if top.min() < 0 else top.max()
                raise MkdDataError(f"{text.where}: {IDS} has id {wrong}, the vocabulary has {self.vocab} tokens")
            order = np.argsort(-log_p, kind="stable")[:k]
            ids[t - 1], logits[t - 1] = top[order], log_p[order]
            rest = -np.expm1(min(np.logaddexp.reduce(log_p[order].astype(np.float64)), 0.0))
            tail[t - 1] = np.log(max(rest, np.exp(_FILLER_LOG_PROB)))
            own = log_p[top == text.ids[t]]
            # A token outside the top-k is at most as probable as the least probable of them, and as the whole tail.
            label[t - 1] = own[0] if len(own) else min(tail[t - 1], log_p[order].min())
        lse = np.zeros((count, 1), dtype=np.float32)
        return segment_hash(torch.from_numpy(text.ids[:-1])), TokenTargets(ids, logits, lse, label, tail[:, None])


@dataclass
class ImportCounts:
    """Number of texts by what was done with them."""

    stored: int = 0
    incomplete: int = 0
    """Left out: they have no supervised token, or one without targets."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The tool's flags."""

    out: Path
    files: tuple[Path, ...]
    teacher: str
    """Name of the teacher that computed the targets."""
    tokenizer: str | None
    """Hash of the tokenizer."""
    vocab: int
    top_k: int | None = None
    lossless: bool = False
    align: Alignment = "token"


def import_targets(options: ImportOptions) -> tuple[CacheMeta, ImportCounts]:
    """Add the targets of some files to a new or existing cache.

    Raises:
        MkdDataError: a file cannot be read or is invalid, or no text can be stored.
        MkdCacheError: the folder holds something else, or targets are not finite.
    """

    def texts() -> Iterator[ImportedText]:
        for file in options.files:
            for where, record in read_records(file):
                yield ImportedText.of(where, record, options.align)

    first = list(islice((text for text in texts() if text.needed), PROBED))
    if not first:
        raise MkdDataError(f"{options.files[0]}: no text has a supervised token (labels are -100 throughout)")
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
    writer, counts = StoreWriter(options.out, meta), ImportCounts()
    for text in texts():
        if text.is_complete:
            writer.add(*plan.token_targets(text))
            counts.stored += 1
        else:
            counts.incomplete += 1
    writer.flush()
    if not counts.stored:
        raise MkdDataError(f"{options.files[0]}: no text has targets for all of its supervised tokens")
    return meta, counts
