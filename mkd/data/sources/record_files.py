"""Files of records as bytes, one record at a time: JSON lines, JSON arrays, plain text, parquet and arrow.

Every record comes out as one JSON object in UTF-8, so that all formats share the code that parses records. Memory holds
a block of the file, and one record of at most MAX_RECORD_BYTES; nothing in a file is executed or unpickled.
"""

import base64
import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from mkd.data.sources.data_files import FileFormat
from mkd.errors import MkdDataError, MkdPackageError
from mkd.utils.json_files import MOST_BYTES

MAX_RECORD_BYTES = MOST_BYTES
"""Limit of a record: a compressed file may hold a line of any length."""
_BLOCK_BYTES = 1 << 20
_TABLE_ROWS = 64
"""Rows of a table that are converted at once."""
_SPACE = re.compile(r"[ \t\n\r]*")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

ColumnChoice = Callable[[list[str]], list[str] | None]
"""The columns of a table that are read, given all; None for all."""


@dataclass(frozen=True)
class RecordStream:
    """The records of an open file."""

    documents: Iterator[bytes]
    unit: str
    """Name of a record, for messages: line, record, row or document."""
    position: Callable[[], int] | None
    """Bytes of the file that have been read; None if they are those of the documents."""


@contextmanager
def open_records(
    path: str, separator: bytes | None = None, columns: ColumnChoice | None = None
) -> Iterator[RecordStream]:
    """Open a file; a suffix that is not known stands for JSON lines.

    Args:
        path: the file.
        separator: between the documents of a text file; None if the file is one document.
        columns: columns that are read of a table; None for all.

    Raises:
        MkdDataError: the file is damaged, or a record is too long; the former also while the records are read.
        MkdPackageError: pyarrow is not installed.
    """
    file = FileFormat.of(path) or FileFormat("json", None)
    kind = file.compression or file.content
    reports = kind in ("gzip", "zstd", "parquet", "arrow")
    try:
        if file.content in ("parquet", "arrow"):
            with _open_table(path, file.content, columns) as stream:
                yield stream
            return
        with open(path, "rb") as raw, _uncompressed(raw, path, file.compression) as data:
            position = None if file.compression is None else raw.tell
            _skip_bom(data, path)
            if file.content == "text":
                yield RecordStream(
                    _documents(data, path, separator, file.compression is not None), "document", position
                )
            elif _begins_array(data):
                yield RecordStream(_array_elements(data, path), "record", raw.tell)
            else:
                yield RecordStream(_lines(data, path), "line", position)
    except (EOFError, zlib.error, OSError) as error:
        if not reports:
            raise
        raise MkdDataError(f"{path} cannot be read as {kind} ({error}): it is damaged or incomplete") from error
    except (ValueError, RecursionError) as error:  # pyarrow's errors too
        raise MkdDataError(f"{path} cannot be read as {kind} ({error}): it is damaged or incomplete") from error


@contextmanager
def _uncompressed(raw: BinaryIO, path: str, compression: str | None) -> Iterator[io.BufferedReader]:
    if compression is None:
        yield raw
    elif compression == "gzip":
        with gzip.GzipFile(fileobj=raw) as data:
            yield data
    else:
        arrow = _pyarrow(path)
        yield io.BufferedReader(_RawStream(arrow.CompressedInputStream(raw, compression)), _BLOCK_BYTES)


class _RawStream(io.RawIOBase):
    """An arrow stream as a file of Python."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _pyarrow(path: str) -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise MkdPackageError(
            f"{path}: reading it needs the package pyarrow, which is not installed (pip install pyarrow)"
        ) from error
    return pyarrow


def _skip_bom(data: Any, path: str) -> None:
    start = data.peek(4)
    if start.startswith(codecs.BOM_UTF8):
        data.read(len(codecs.BOM_UTF8))
    elif start.startswith(_UTF16):
        raise MkdDataError(f"{path}: not UTF-8 but UTF-16: convert it with iconv -f UTF-16 -t UTF-8")


def _begins_array(data: Any) -> bool:
    return data.peek(_BLOCK_BYTES).lstrip().startswith(b"[")


def _lines(data: Any, path: str) -> Iterator[bytes]:
    number = 0
    while line := data.readline(MAX_RECORD_BYTES + 1):
        number += 1
        _check_length(len(line), f"{path}, line {number}")
        yield line


def _check_length(length: int, where: str) -> None:
    if length > MAX_RECORD_BYTES:
        raise MkdDataError(f"{where} is longer than {MAX_RECORD_BYTES >> 20} MiB: cut it into several records")


def _documents(data: Any, path: str, separator: bytes | None, bounded: bool) -> Iterator[bytes]:
    """Documents of a text file. A file that is not compressed may be a single one of any length."""
    if separator is None:
        document = data.read(MAX_RECORD_BYTES + 1) if bounded else data.read()
        if bounded:
            _check_length(len(document), f"{path}, document 1")
        yield document
        return
    rest, number = b"", 1
    while block := data.read(_BLOCK_BYTES):
        *documents, rest = (rest + block).split(separator)
        yield from documents
        number += len(documents)
        if bounded:
            _check_length(len(rest), f"{path}, document {number}")
    if rest:
        yield rest


class _ArrayText:
    """The text of a JSON array from the current position on, read block by block."""

    def __init__(self, data: Any, path: str) -> None:
        self._data, self._path = data, path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scanner = json.JSONDecoder()
        self._text, self._position, self._is_whole = "", 0, False

    def _read_more(self) -> None:
        """Read as much as is left, at least a block: a long element is scanned a few times, not once per block."""
        block = self._data.read(max(_BLOCK_BYTES, len(self._text) - self._position))
        try:
            more = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise MkdDataError(f"{self._path}: not UTF-8 ({error.reason})") from None
        self._text, self._position = self._text[self._position :] + more, 0
        self._is_whole = not block

    def next_character(self) -> str:
        """The next character that is not white space, which is not consumed; empty at the end of the file."""
        while True:
            self._position = _SPACE.match(self._text, self._position).end()
            if self._position < len(self._text) or self._is_whole:
                return self._text[self._position : self._position + 1]
            self._read_more()

    def skip_character(self) -> None:
        self._position += 1

    def element(self, where: str) -> bytes:
        """Consume one JSON value. Raises MkdDataError that names `where` if it is broken or too long."""
        while True:
            try:
                _, end = self._scanner.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                self._require_more(error, where)
            except RecursionError:
                raise MkdDataError(f"{where}: broken JSON (nested too deeply)") from None
            except ValueError as error:  # a number of too many digits
                raise MkdDataError(f"{where}: broken JSON ({error})") from None
            else:
                if end < len(self._text) or self._is_whole:  # a number may have more digits
                    _check_length(end - self._position, where)
                    element, self._position = self._text[self._position : end], end
                    return element.encode()
            self._read_more()

    def _require_more(self, error: json.JSONDecodeError, where: str) -> None:
        """Raise the error unless the rest of the file may correct it."""
        _check_length(len(self._text) - self._position, where)
        is_at_end = error.pos > len(self._text) - 16 or error.msg.startswith("Unterminated string")
        if self._is_whole or not is_at_end:
            raise MkdDataError(
                f"{where}: broken JSON ({error.msg}); the file must be one JSON array of objects, or have one JSON "
                "object per line"
            )


def _array_elements(data: Any, path: str) -> Iterator[bytes]:
    text, number = _ArrayText(data, path), 0
    assert text.next_character() == "["
    text.skip_character()
    if text.next_character() == "]":
        text.skip_character()
    else:
        while True:
            number += 1
            yield text.element(f"{path}, record {number}")
            following = text.next_character()
            text.skip_character()
            if following == "]":
                break
            if following != "," or text.next_character() == "":
                wrong = "the file ends" if following in ("", ",") else f"{following!r} stands"
                raise MkdDataError(f"{path}: broken JSON ({wrong} where the array should go on after record {number})")
    if text.next_character() != "":
        raise MkdDataError(
            f"{path}: broken JSON (the array ends after record {number}, and more follows); the file must be one JSON "
            "array of objects, or have one JSON object per line"
        )


@contextmanager
def _open_table(path: str, content: str, columns: ColumnChoice | None) -> Iterator[RecordStream]:
    open_batches = _parquet_batches if content == "parquet" else _arrow_batches
    with open_batches(_pyarrow(path), path, columns) as (batches, position):
        yield RecordStream(_rows(batches, path), "row", position)


@contextmanager
def _parquet_batches(arrow: ModuleType, path: str, columns: ColumnChoice | None) -> Iterator[tuple[Any, Any]]:
    from pyarrow import parquet

    size, done = Path(path).stat().st_size, 0
    # With a buffer, a column of a row group is read in parts.
    with parquet.ParquetFile(path, buffer_size=_BLOCK_BYTES, pre_buffer=False) as file:
        wanted = None if columns is None else columns(file.schema_arrow.names)
        rows = max(1, file.metadata.num_rows)

        def batches() -> Iterator[Any]:
            nonlocal done
            for batch in file.iter_batches(batch_size=_TABLE_ROWS, columns=wanted):
                yield batch
                done += batch.num_rows

        yield batches(), lambda: done * size // rows


@contextmanager
def _arrow_batches(arrow: ModuleType, path: str, columns: ColumnChoice | None) -> Iterator[tuple[Any, Any]]:
    with arrow.memory_map(path) as source:
        is_stream = source.read(6) != b"ARROW1"
        source.seek(0)
        reader = arrow.ipc.open_stream(source) if is_stream else arrow.ipc.open_file(source)
        wanted = None if columns is None else columns(reader.schema.names)

        def batches() -> Iterator[Any]:
            whole = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in whole:
                batch.validate(full=True)  # offsets that point outside of the file
                batch = batch if wanted is None else batch.select(wanted)
                for start in range(0, batch.num_rows, _TABLE_ROWS):
                    yield batch.slice(start, _TABLE_ROWS)

        yield batches(), source.tell if is_stream else None


def _rows(batches: Iterator[Any], path: str) -> Iterator[bytes]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            record = json.dumps(_without_nulls(row), ensure_ascii=False, default=_plain_value).encode()
            _check_length(len(record), f"{path}, row {number}")
            yield record


def _without_nulls(value: Any) -> Any:
    """The value without the keys that are null: all objects of a column have the same keys, those of any of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _plain_value(value: Any) -> str:
    """Values that JSON lacks: bytes (of images) in base64, times and decimal numbers as text."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
