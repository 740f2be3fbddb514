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
from mkd.utils.pretrained import load_tokenizer

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt", ".text")

BATCH_BYTES = 1 << 20
"""Raw text per batch: large enough that sending it costs little, small enough that all workers finish together."""


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
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise MkdDataError(
            f"{where}: broken JSON ({error.msg} at column {error.colno}); each line must be one JSON object"
        ) from None
    if not isinstance(record, dict):
        raise MkdDataError(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object")
    return record


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


def encode(encoding: Encoding, batch: RawBatch) -> EncodedBatch:
    """Parse and tokenize a batch. The only special token added is the end of document.

    Raises MkdDataError as `parse` does.
    """
    tokenizer = once_per_process(load_tokenizer, encoding.tokenizer_dir)
    texts = parse(batch, encoding.json_key)
    documents = (
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        if texts
        else []
    )
    if encoding.append_eod:
        eod = eod_id(tokenizer, encoding.tokenizer_dir)
        for ids in documents:
            ids.append(eod)
    documents = [ids for ids in documents if ids]
    tokens = [np.empty(0, np.int32), *(np.asarray(ids, dtype=np.int32) for ids in documents)]
    empty = len(batch.documents) - len(documents)
    return EncodedBatch(np.concatenate(tokens), [len(ids) for ids in documents], batch.size, empty)
