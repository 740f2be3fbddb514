"""Documents from text files, and their token ids: the part of preprocessing that runs in worker processes.

A batch of raw documents is sent to a worker as bytes and comes back as one array of token ids, so that parsing JSON,
checking it and tokenizing are all spread over the workers.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.errors import MkdDataError
from mkd.utils.json_files import parse_json
from mkd.utils.limits import call_within
from mkd.utils.pretrained import load_tokenizer

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt", ".text")

BATCH_BYTES = 1 << 20
"""Raw text per batch: large enough that sending it costs little, small enough that all workers finish together."""
_LONGEST_WORD = 1 << 20
"""Characters without whitespace. BPE takes 1 s and 0.1 GB for 10^6 of them, 10 s and 0.5 GB for 5 times as many."""
_LEAST_SECONDS, _SLOWEST_RATE = 20.0, 100_000
"""Time in which a batch must be tokenized, in seconds and characters per second; usual are 10^6 per second."""


@dataclass(frozen=True)
class RawBatch:
    """Consecutive documents of one file, not yet parsed."""

    path: str
    first: int
    """Line number (JSON lines) or document number (text) of the first document, counted from 1."""
    documents: list[bytes]
    is_json: bool

    @property
    def size(self) -> int:
        """Bytes read from the file for this batch."""
        return sum(map(len, self.documents))


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


@dataclass(frozen=True)
class Encoding:
    """Options of turning documents into token ids."""

    tokenizer_dir: str
    json_key: str = "text"
    append_eod: bool = True


def check_inputs(paths: Sequence[str]) -> None:
    """Raise MkdDataError unless every path is a non-empty file with a known suffix."""
    for name in paths:
        path = Path(name)
        if not path.is_file():
            raise MkdDataError(f"--input {name} does not exist or is not a file")
        if path.stat().st_size == 0:
            raise MkdDataError(f"--input {name} is empty")
        if path.suffix not in JSON_SUFFIXES + TEXT_SUFFIXES:
            raise MkdDataError(
                f"--input {name} ends in {path.suffix!r}: JSON lines must end in {' or '.join(JSON_SUFFIXES)}, "
                f"plain text in {' or '.join(TEXT_SUFFIXES)}"
            )


def read_batches(paths: Sequence[str], split_on: str | None = None) -> Iterator[RawBatch]:
    """Read the files in order, about BATCH_BYTES at a time.

    A JSON lines file holds one document per line. A text file is one document, or with `split_on` several, separated by
    it.
    """
    for name in paths:
        is_json = Path(name).suffix in JSON_SUFFIXES
        with open(name, "rb") as handle:
            documents = handle if is_json else _split_text(handle, split_on)
            first, held, size = 1, [], 0
            for document in documents:
                held.append(document)
                size += len(document)
                if size >= BATCH_BYTES:
                    yield RawBatch(name, first, held, is_json)
                    first, held, size = first + len(held), [], 0
            if held:
                yield RawBatch(name, first, held, is_json)


def _split_text(handle, split_on: str | None) -> Iterator[bytes]:
    if split_on is None:
        yield handle.read()
        return
    separator, rest = split_on.encode(), b""
    while block := handle.read(BATCH_BYTES):
        *documents, rest = (rest + block).split(separator)
        yield from documents
    if rest:
        yield rest


def parse(batch: RawBatch, json_key: str) -> list[str]:
    """Documents of a batch as strings, without those that hold only whitespace.

    Raises MkdDataError with file and line for text that is not UTF-8, a line that is not a JSON object, and an object
    without a string under `json_key`.
    """
    texts = []
    unit = "line" if batch.is_json else "document"
    for number, raw in enumerate(batch.documents, start=batch.first):
        where = f"{batch.path}, {unit} {number}"
        text = decode(raw, where, unit)
        if batch.is_json and text.strip():
            text = _text_of_line(text, json_key, where)
        _require_short_words(text, where)
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
        record = parse_json(line)
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
        raise MkdDataError(f"{where}: no key {json_key!r} (keys there: {keys}); name the text's key with --json-key")
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
    texts = parse(batch, encoding.json_key)
    documents = _ids(tokenizer, texts, f"{batch.path}, from document {batch.first} on") if texts else []
    if encoding.append_eod:
        eod = eod_id(tokenizer, encoding.tokenizer_dir)
        for ids in documents:
            ids.append(eod)
    documents = [ids for ids in documents if ids]
    tokens = [np.empty(0, np.int32), *(np.asarray(ids, dtype=np.int32) for ids in documents)]
    empty = len(batch.documents) - len(documents)
    return EncodedBatch(np.concatenate(tokens), [len(ids) for ids in documents], batch.size, empty)
