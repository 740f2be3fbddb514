"""Text files to Megatron's indexed files: PREFIX.bin (token ids), PREFIX.idx (document bounds), PREFIX.json (facts).

The three are written under temporary names and renamed together at the end, PREFIX.idx last, because Megatron treats a
data set without it as missing. A job that is killed leaves nothing that can be mistaken for a data set. A lock keeps
other processes from writing the same data set meanwhile.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mkd.data.sources.parallel import map_in_order
from mkd.data.sources.text import BadRecords, EncodedBatch, Encoding, encode, eod_id, input_files, read_batches
from mkd.errors import MkdDataError
from mkd.utils.atomic_files import PARTIAL, naming, only_writer, publish_files, regular_target
from mkd.utils.json_files import read_json
from mkd.utils.model_folders.pretrained import load_tokenizer

BYTES_PER_WORKER = 4 << 20
"""Input below which another worker process costs more to start (about 2 s) than it saves."""

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""PREFIX.idx begins with magic, version, dtype code, number of sequences, number of documents; then the lengths of the
sequences, int32 (megatron's _IndexWriter)."""
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16

SUFFIXES = (".bin", ".json", ".idx")
"""Files of a data set, in the order in which they get their names."""

Progress = Callable[[int, int, int], None]
"""Called with the documents, tokens and input bytes done so far, at the start and after each batch."""


@dataclass(frozen=True)
class IndexedText:
    """Facts about an indexed data set, stored beside it as PREFIX.json."""

    documents: int
    tokens: int
    max_token_id: int
    """The largest id in the data: a model needs an embedding of more rows than this."""
    vocab_size: int
    """Vocabulary size of the tokenizer, with added tokens."""
    tokenizer_hash: str | None
    """`mkd.checkpoint.hf.folder.tokenizer_hash` of the tokenizer: equal to that of the models that read this data."""
    eod: int | None
    """Id that ends each document; None if none was appended."""
    dtype: str
    """numpy name of the ids in PREFIX.bin."""
    skipped: int
    """Documents and lines left out because they hold nothing but whitespace."""
    fingerprint: str | None = None
    """`data_fingerprint` of the two files; None in facts that an older version wrote."""

    @classmethod
    def load(cls, prefix: str) -> "IndexedText | None":
        """Read PREFIX.json; None if it does not exist, as for data made by another tool.

        Raises MkdDataError if the file is broken or does not describe the PREFIX.bin beside it.
        """
        path = Path(f"{prefix}.json")
        if not path.is_file():
            return None
        try:
            facts = cls(**read_json(path))
            for name in ("documents", "tokens", "max_token_id", "vocab_size", "skipped"):
                if type(value := getattr(facts, name)) is not int or value < 0:
                    raise ValueError(f"{name} is {str(value)[:40]!r}")
            itemsize = np.dtype(facts.dtype).itemsize
        except (ValueError, TypeError) as error:
            raise MkdDataError(f"{path} is broken ({error}): make the data again with mkd preprocess") from None
        binary = Path(f"{prefix}.bin")
        size = binary.stat().st_size if binary.is_file() else 0
        if size != facts.tokens * itemsize:
            raise MkdDataError(
                f"{path} describes {facts.tokens} tokens of {facts.dtype}, but {binary} has {size} bytes: delete "
                f"{path} if another tool made the data, else make it again with mkd preprocess"
            )
        index = Path(f"{prefix}.idx")
        if facts.fingerprint is not None and index.is_file() and facts.fingerprint != data_fingerprint(binary, index):
            raise MkdDataError(
                f"{path} describes other tokens than those in {binary} and {index}: delete {path} if another tool made "
                "the data, else make it again with mkd preprocess"
            )
        return facts


def index_fingerprint(prefix: str) -> str:
    """128-bit hex hash of the number and lengths of the documents in PREFIX.idx.

    It depends on the content alone, so that all ranks get the same one whichever copy of the file they read.
    """
    path = Path(f"{prefix}.idx").resolve()
    state = path.stat()
    return _hash_of_lengths(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_of_lengths(path: Path, size: int, modified: int) -> str:
    """Hash of header and lengths; size and time of modification are part of the key of this process's cache."""
    with path.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
        sequences = INDEX_HEADER.unpack(header)[3]
        return _hash(header, file.read(4 * sequences))


def data_fingerprint(binary: Path, index: Path) -> str:
    """128-bit hex hash of an indexed data set: lengths of its documents, size and 64 blocks of 64 KiB of its tokens.

    Reads 4 bytes per document and at most 4 MiB of tokens.
    """
    lengths = _hash_of_lengths(index, index.stat().st_size, index.stat().st_mtime_ns)
    return _hash(lengths.encode(), *_sampled(binary))


def file_fingerprint(path: Path) -> str:
    """128-bit hex hash of a file's size and 64 blocks of 64 KiB."""
    return _hash(*_sampled(path))


def _sampled(path: Path) -> list[bytes]:
    size = path.stat().st_size
    parts = [str(size).encode()]
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            parts.append(file.read(_SAMPLE_BYTES))
    return parts


def _hash(*parts: bytes) -> str:
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


def dataset_prefix(output_prefix: str, json_key: str) -> str:
    """Name that Megatron's own tool gives a data set, for `--data-path`."""
    return f"{output_prefix}_{json_key}_document"


def default_workers(paths: Sequence[str]) -> int:
    """One process per usable core, fewer for a small input."""
    size = sum(Path(path).stat().st_size for path in paths)
    return max(1, min(len(os.sched_getaffinity(0)), size // BYTES_PER_WORKER))


def write_indexed_text(
    paths: Sequence[str],
    prefix: str,
    encoding: Encoding,
    *,
    workers: int,
    tokenizer_hash: str | None = None,
    split_on: str | None = None,
    progress: Progress | None = None,
    bad: BadRecords | None = None,
) -> IndexedText:
    """Tokenize the documents of `paths`, in order, into PREFIX.bin, PREFIX.idx and PREFIX.json. Broken records that the
    encoding leaves out are added to `bad`.

    Token ids are stored as uint16 when the vocabulary has fewer than 65500 entries, else as int32, which is what
    Megatron chooses. Raises MkdDataError for invalid input or tokenizer, and MkdConfigError if another process writes
    this data set or one of its files is not a regular file; an existing data set is then kept unchanged.
    """
    files, bad = input_files(paths), BadRecords() if bad is None else bad
    tokenizer = load_tokenizer(encoding.tokenizer_dir)
    eod = eod_id(tokenizer, encoding.tokenizer_dir) if encoding.append_eod else None
    with _output(prefix), naming(Path(prefix)):
        writer = _Writer(prefix, len(tokenizer))
        if progress is not None:
            progress(0, 0, 0)
        try:
            advice = f"give fewer than --workers {workers}"
            batches = read_batches(files, split_on, encoding.columns)
            for batch in map_in_order(partial(encode, encoding), batches, workers, advice):
                writer.add(batch)
                bad.merge(batch.bad)
                if progress is not None:
                    progress(writer.documents, writer.tokens, writer.size)
            if writer.documents == 0 and bad.count:
                raise MkdDataError(f"--input {' '.join(paths)}: no document can be used ({bad})")
            if writer.documents == 0:
                raise MkdDataError(f"--input {' '.join(paths)}: every document contains only whitespace")
            facts = IndexedText(
                documents=writer.documents,
                tokens=writer.tokens,
                max_token_id=writer.max_token_id,
                vocab_size=len(tokenizer),
                tokenizer_hash=tokenizer_hash,
                eod=eod,
                dtype=np.dtype(writer.dtype).name,
                skipped=writer.skipped,
            )
            return writer.publish(facts)
        finally:
            writer.remove_partials()


@contextmanager
def _output(prefix: str) -> Iterator[None]:
    """Check the names of a data set, and lock it inside the `with` block."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        regular_target(Path(prefix + suffix), "--output-prefix")
    with only_writer(Path(prefix)):
        yield


class _Writer:
    """The three files under their temporary names, and counts of what was written."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        # Imported here: worker processes import this module too, and importing megatron takes seconds.
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self.binary, self.facts, self.index = (Path(f"{prefix}{suffix}{PARTIAL}") for suffix in SUFFIXES)
        self.dtype = DType.optimal_dtype(vocab_size)
        self.builder = IndexedDatasetBuilder(str(self.binary), dtype=self.dtype)
        self.documents = self.tokens = self.max_token_id = self.skipped = self.size = 0

    def add(self, batch: EncodedBatch) -> None:
        start = 0
        for length in batch.lengths:
            self.builder.add_document(batch.tokens[start : start + length], [length])
            start += length
        self.documents += len(batch.lengths)
        self.tokens += batch.tokens.size
        self.max_token_id = max(self.max_token_id, int(batch.tokens.max(initial=0)))
        self.skipped += batch.empty
        self.size += batch.size

    def publish(self, facts: IndexedText) -> IndexedText:
        """Rename all files; an older index is removed first, so that it is never paired with newer tokens.

        Returns:
            The facts, with the fingerprint of the finished files.
        """
        self.builder.finalize(str(self.index))
        facts = replace(facts, fingerprint=data_fingerprint(self.binary, self.index))
        self.facts.write_text(json.dumps(asdict(facts), indent=1) + "\n")
        regular_target(self.index.with_suffix("")).unlink(missing_ok=True)
        publish_files({path: path.with_suffix("") for path in (self.binary, self.facts, self.index)})
        return facts

    def remove_partials(self) -> None:
        self.builder.data_file.close()
        for path in (self.binary, self.facts, self.index):
            path.unlink(missing_ok=True)
