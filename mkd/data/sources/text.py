"""Documents from text files, and their token ids: the part of preprocessing that runs in worker processes.

A batch of raw documents is sent to a worker as bytes and comes back as one array of token ids, so that parsing JSON,
checking it and tokenizing are all spread over the workers.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.data.sources.data_files import TEXTS, data_files
from mkd.data.sources.record_files import ColumnChoice, RecordStream, open_records
from mkd.data.sources.record_forms import is_conversation
from mkd.errors import MkdDataError
from mkd.utils.json_files import parse_json
from mkd.utils.limits import call_within
from mkd.utils.model_folders.pretrained import load_tokenizer

BATCH_BYTES = 1 << 20
"""Raw text per batch: large enough that sending it costs little, small enough that all workers finish together."""
_LONGEST_WORD = 1 << 20
"""Characters without whitespace. BPE takes 1 s and 0.1 GB for 10^6 of them, 10 s and 0.5 GB for 5 times as many."""
_LEAST_SECONDS, _SLOWEST_RATE = 20.0, 100_000
"""Time in which a batch must be tokenized, in seconds and characters per second; usual are 10^6 per second."""
BROKEN = "that are broken"
"""Reason for leaving out records, with --kd-bad-records skip."""
_NAMED_RECORDS, _MESSAGE_LENGTH = 5, 200
"""Reasons for which records are broken that are named, and records of each; characters of a reason."""
_LOCATED = re.compile(r"(.*?), (line|record|row|document)s? (\d+(?:, \d+)*(?:, \.\.\.)?): (.*)", re.DOTALL)
"""A message about broken records: file, unit, numbers, reason."""


@dataclass(frozen=True)
class RawBatch:
    """Consecutive documents of one file, not yet parsed."""

    path: str
    first: int
    """Number of the first document in the file, counted from 1."""
    documents: list[bytes]
    unit: str = "line"
    """Name of a document, for messages: line (of JSON), record (of a JSON array), row (of a table), or document (of
    text)."""
    bytes_read: int | None = None
    """Bytes read from the file for this batch; None if they are those of the documents."""

    @property
    def is_json(self) -> bool:
        """True if each document is a JSON object, False if it is text."""
        return self.unit != "document"

    @property
    def size(self) -> int:
        """Bytes read from the file for this batch."""
        return sum(map(len, self.documents)) if self.bytes_read is None else self.bytes_read

    def located(self) -> Iterator[tuple[str, bytes]]:
        """(file and number, for messages; document) of each document."""
        for number, document in enumerate(self.documents, start=self.first):
            yield f"{self.path}, {self.unit} {number}", document


@dataclass
class BadRecords:
    """Records left out because they are broken."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Messages about the first few reasons; each begins with the file and the numbers of the first few records."""

    def add(self, error: MkdDataError) -> None:
        """Count a record by the error that it has raised."""
        self.count += 1
        self._name(" ".join(str(error).split()))

    def merge(self, other: "BadRecords") -> None:
        """Add those of a later batch."""
        self.count += other.count
        for message in other.first:
            self._name(message)

    def _name(self, message: str) -> None:
        """Add a message, or its numbers to the message with the same reason."""
        where, numbers, reason = _parts_of(message)
        for place, named in enumerate(self.first):
            if (found := _parts_of(named))[0] == where and found[2] == reason:
                self.first[place] = _message(where, [*found[1], *numbers], reason)
                return
        if len(self.first) < _NAMED_RECORDS:
            self.first.append(_message(where, numbers, reason))

    def __str__(self) -> str:
        return f"{self.count} broken records left out: {'; '.join(with_ellipsis(self.first, self.count))}"


def with_ellipsis(messages: Sequence[str], count: int) -> list[str]:
    """Messages of `BadRecords`, and an ellipsis if they do not account for all `count` records."""
    numbers = [number for message in messages for number in _parts_of(message)[1] or [message]]
    return [*messages, *(["..."] if len(numbers) < count and "..." not in numbers else [])]


def _parts_of(message: str) -> tuple[str, list[str], str]:
    """(file and unit, numbers of the records, reason); without numbers where the message names no record."""
    found = _LOCATED.fullmatch(message)
    file, unit, numbers, reason = found.groups() if found else ("", "", "", message)
    shown = reason if len(reason) <= _MESSAGE_LENGTH else f"{reason[: _MESSAGE_LENGTH - 3]}..."
    return f"{file}, {unit}" if found else "", numbers.split(", ") if found else [], shown


def _message(where: str, numbers: Sequence[str], reason: str) -> str:
    """A message about the first few of the records with these numbers."""
    if not numbers:
        return reason
    shown = [*numbers[:_NAMED_RECORDS], *(["..."] if len(numbers) > _NAMED_RECORDS else [])]
    return f"{where}{'s' if len(numbers) > 1 else ''} {', '.join(shown)}: {reason}"


@dataclass(frozen=True)
class EncodedBatch:
    """Token ids of the documents of a batch, one after another."""

    tokens: np.ndarray
    """[sum of lengths] int32."""
    lengths: list[int]
    """Tokens of each document, all > 0."""
    size: int
    """Bytes of the raw batch."""
    empty: int
    """Documents left out because they hold only whitespace."""
    bad: BadRecords = field(default_factory=BadRecords)


@dataclass(frozen=True)
class Encoding:
    """Options of turning documents into token ids."""

    tokenizer_dir: str
    json_key: str = "text"
    append_eod: bool = True
    skips_bad: bool = False
    """Leave out broken records and count them; else the first one is an error."""

    def columns(self, names: list[str]) -> list[str] | None:
        """Columns of a table that are read; None, for all, if the text's is missing and a message has to list them."""
        return [self.json_key] if self.json_key in names else None


def input_files(names: Sequence[str]) -> list[str]:
    """The files that the names in --input stand for. Raises MkdDataError as `data_files` does."""
    return [file for name in names for file in data_files(name, "--input", TEXTS)]


def read_batches(
    paths: Sequence[str], split_on: str | None = None, columns: ColumnChoice | None = None, size: int | None = None
) -> Iterator[RawBatch]:
    """Read the files in order, about BATCH_BYTES at a time.

    Args:
        paths: files; each record is one document. A text file is one document, or with `split_on` several.
        split_on: separator of the documents in text files.
        columns: columns that are read of tables; None for all.
        size: bytes of documents per batch in place of BATCH_BYTES.
    """
    for path in paths:
        with open_records(path, split_on.encode() if split_on else None, columns) as records:
            yield from _batches_of(path, records, size or BATCH_BYTES)


def _batches_of(path: str, records: RecordStream, size: int) -> Iterator[RawBatch]:
    first, held, held_bytes, start = 1, [], 0, 0
    for document in chain(records.documents, (None,)):
        if document is not None:
            held.append(document)
            held_bytes += len(document)
        if held and (document is None or held_bytes >= size):
            end = None if records.position is None else records.position()
            yield RawBatch(path, first, held, records.unit, None if end is None else end - start)
            first, held, held_bytes, start = first + len(held), [], 0, end


def parse(batch: RawBatch, json_key: str, bad: BadRecords | None = None) -> list[str]:
    """Documents of a batch as strings, without those that hold only whitespace.

    Args:
        batch: the documents.
        json_key: key of the text in a JSON object.
        bad: counts broken records, which are left out; None to raise their errors.

    Raises MkdDataError with file and line for text that is not UTF-8, a line that is not a JSON object, and an object
    without a string under `json_key`.
    """
    texts = []
    for where, raw in batch.located():
        try:
            text = decode(raw, where, batch.unit)
            if batch.is_json and text.strip():
                text = _text_of_line(text, json_key, where)
            _require_short_words(text, where)
        except MkdDataError as error:
            if bad is None:
                raise
            bad.add(error)
            continue
        if text.strip():
            texts.append(text)
    return texts


def decode(raw: bytes, where: str, unit: str = "line") -> str:
    """Decode UTF-8 bytes. Raises MkdDataError that names `where`."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise MkdDataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the {unit})") from None


def json_object(line: str, where: str) -> dict[str, Any]:
    """Parse a line of a JSON lines file. Raises MkdDataError that names `where` if it is not a JSON object."""
    try:
        record = parse_json(line, unique=True)
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise MkdDataError(f"{where}: broken JSON ({reason}); each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise MkdDataError(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object")
    left: list[Any] = [record] if len(line) > _LONGEST_WORD else []
    while left:
        value = left.pop()
        if isinstance(value, str):
            _require_short_words(value, where)
        elif isinstance(value, list | dict):
            left += value.values() if isinstance(value, dict) else value
    return record


def _require_short_words(text: str, where: str) -> None:
    """Raise MkdDataError for a run of characters without whitespace on which a tokenizer would spend minutes and
    gigabytes."""
    if len(text) > _LONGEST_WORD and (longest := max(map(len, text.split()), default=0)) > _LONGEST_WORD:
        raise MkdDataError(
            f"{where}: {longest:,} characters without whitespace; at most {_LONGEST_WORD:,} can be tokenized: break "
            "the text, or leave it out"
        )


def require_unicode(text: str, where: str) -> None:
    """Raise MkdDataError for half a surrogate pair, which JSON can encode and tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MkdDataError(f"{where}: half a surrogate pair at character {error.start}") from None


def _text_of_line(line: str, json_key: str, where: str) -> str:
    record = json_object(line, where)
    if json_key not in record:
        keys = ", ".join(sorted(record)) or "none"
        advice = "name the text's key with --json-key"
        if is_conversation(record):
            advice = "conversations need no preprocessing: give the file to mkd train as --data-path"
        raise MkdDataError(f"{where}: no key {json_key!r} (keys there: {keys}); {advice}")
    if not isinstance(record[json_key], str):
        kind = type(record[json_key]).__name__
        raise MkdDataError(f"{where}: the value of {json_key!r} is a {kind}, not a string; see --json-key")
    require_unicode(record[json_key], where)
    return record[json_key]


@lru_cache(maxsize=8)
def once_per_process[Loaded](load: Callable[..., Loaded], *args: str) -> Loaded:
    """`load(*args)`, cached in this process: a worker process reads a tokenizer once, not once per batch.

    Args:
        load: reads a tokenizer, or an object around one.
        args: folder, and flag that named it.
    """
    return load(*args)


def eod_id(tokenizer: PreTrainedTokenizerBase, directory: str) -> int:
    """Id of the tokenizer's end-of-sequence token, which ends a document. Raises MkdDataError if it has none."""
    if tokenizer.eos_token_id is None:
        raise MkdDataError(
            f"--tokenizer-model {directory} has no eos_token to end documents with: set one in its "
            "tokenizer_config.json, or give --no-append-eod"
        )
    return tokenizer.eos_token_id


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], where: str) -> list[list[int]]:
    """Token ids of some texts. Raises MkdDataError if the tokenizer's patterns take too long."""

    def tokenize() -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    size = sum(map(len, texts))
    seconds = _LEAST_SECONDS + size / _SLOWEST_RATE
    try:
        return call_within(seconds, tokenize)
    except (TimeoutError, RuntimeError) as error:
        raise MkdDataError(
            f"{where}: {size:,} characters cannot be tokenized in {seconds:.0f} s ({error}): a pattern in the "
            "tokenizer backtracks on this text, or it has too long words"
        ) from error


def encode(encoding: Encoding, batch: RawBatch) -> EncodedBatch:
    """Parse and tokenize a batch. The only special token added is the end of document.

    Raises MkdDataError as `parse` does.
    """
    tokenizer = once_per_process(load_tokenizer, encoding.tokenizer_dir)
    bad = BadRecords()
    texts = parse(batch, encoding.json_key, bad if encoding.skips_bad else None)
    documents = _ids(tokenizer, texts, f"{batch.path}, from document {batch.first} on") if texts else []
    if encoding.append_eod:
        eod = eod_id(tokenizer, encoding.tokenizer_dir)
        for ids in documents:
            ids.append(eod)
    documents = [ids for ids in documents if ids]
    tokens = [np.empty(0, np.int32), *(np.asarray(ids, dtype=np.int32) for ids in documents)]
    empty = len(batch.documents) - len(documents) - bad.count
    return EncodedBatch(np.concatenate(tokens), [len(ids) for ids in documents], batch.size, empty, bad)
