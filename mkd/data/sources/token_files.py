"""Megatron's token files, PREFIX.bin and PREFIX.idx: the whole index is checked once, every read of tokens is checked.

The index consists of a header, the lengths of the sequences (int32), their starts in PREFIX.bin in bytes (int64), and
the bounds of the documents (int64). Lengths determine starts and the size of PREFIX.bin, so a change of any of them is
found. It is read in blocks: 20 bytes per sequence pass through memory once.

PREFIX.bin is read with `pread`, not mapped: if the file is truncated while it is read, a short read is an error that
can be reported, while a mapped page beyond the end kills the process.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from mkd.data.sources.indexed import INDEX_HEADER
from mkd.errors import MkdDataError
from mkd.utils.mapped_files import SizeGuard

_MAGIC = b"MMIDIDX\x00\x00"
_BLOCK = 1 << 20
"""Sequences that are checked at once."""
_READ = 1 << 30
"""Bytes of one call of `pread`, which reads at most 2 GiB."""


@dataclass(frozen=True)
class TokenIndex:
    """Facts in the header of PREFIX.idx."""

    dtype: np.dtype
    """dtype of the ids in PREFIX.bin."""
    sequences: int
    bounds: int
    """Number of document bounds."""


def check_index(prefix: str) -> TokenIndex:
    """Check all of PREFIX.idx, and the size of PREFIX.bin.

    Raises:
        MkdDataError: a length is negative, starts are not the running sums of the lengths, the bounds of documents do
        not rise from 0 to the number of sequences, or a file has another size than these imply.
    """
    states = [os.stat(f"{prefix}{suffix}") for suffix in (".idx", ".bin")]
    return _check_index(prefix, *((state.st_size, state.st_mtime_ns, state.st_ino) for state in states))


@lru_cache(maxsize=1024)
def _check_index(prefix: str, index_state: tuple[int, ...], binary_state: tuple[int, ...]) -> TokenIndex:
    """`check_index`; the states of the files are part of the key of this process's cache."""
    path = Path(f"{prefix}.idx")
    try:
        with path.open("rb") as file:
            return _IndexCheck(f"--data-path {prefix}: {path}", file.fileno(), index_state[0]).run(
                f"--data-path {prefix}: {prefix}.bin", binary_state[0]
            )
    except OSError as error:
        raise MkdDataError(f"--data-path {prefix}: {path} cannot be read ({error.strerror})") from error


class _IndexCheck:
    """One check of an open PREFIX.idx."""

    def __init__(self, where: str, descriptor: int, size: int) -> None:
        self._where, self._descriptor, self._size = where, descriptor, size
        self.index = self._header()
        self._starts = INDEX_HEADER.size + 4 * self.index.sequences
        self._bounds = self._starts + 8 * self.index.sequences

    def run(self, binary: str, binary_size: int) -> TokenIndex:
        index = self.index
        wanted = self._bounds + 8 * index.bounds
        # Multimodal sets end with one byte per sequence.
        if self._size not in (wanted, wanted + index.sequences):
            kind = "is truncated" if self._size < wanted else "is damaged"
            raise self._failure(f"{kind}: {wanted} bytes expected, {self._size} seen")
        wanted = self._end_of_sequences(binary_size)
        if binary_size != wanted:
            raise MkdDataError(f"{binary} has {binary_size} bytes, its index describes {wanted}")
        self._check_bounds()
        return index

    def _failure(self, text: str) -> MkdDataError:
        return MkdDataError(f"{self._where} {text}")

    def _damage(self, text: str) -> MkdDataError:
        return self._failure(f"is damaged: {text}; make the data again (mkd preprocess), or copy it again")

    def _read(self, kind: str, offset: int, count: int) -> np.ndarray:
        content = os.pread(self._descriptor, count * np.dtype(kind).itemsize, offset)
        if len(content) < count * np.dtype(kind).itemsize:
            raise self._failure("became shorter while it was checked")
        return np.frombuffer(content, kind)

    def _header(self) -> TokenIndex:
        head = os.pread(self._descriptor, INDEX_HEADER.size, 0)
        if len(head) < INDEX_HEADER.size or not head.startswith(_MAGIC):
            raise self._failure("is not an index of Megatron's indexed data sets")
        _, version, code, sequences, bounds = INDEX_HEADER.unpack(head)
        if version != 1:
            raise self._failure(f"has version {version}, and Megatron reads version 1")
        if code not in (kind.value for kind in DType) or not np.issubdtype(DType.dtype_from_code(code), np.integer):
            raise self._damage(f"its dtype code is {code}, which is not one of integers")
        if sequences == 0:
            raise self._failure("lists no document")
        return TokenIndex(np.dtype(DType.dtype_from_code(code)), sequences, bounds)

    def _end_of_sequences(self, binary_size: int) -> int:
        """Size of PREFIX.bin in bytes that the lengths imply, after a comparison with the starts."""
        end, itemsize = 0, self.index.dtype.itemsize
        for first in range(0, self.index.sequences, _BLOCK):
            count = min(_BLOCK, self.index.sequences - first)
            lengths = self._read("<i4", INDEX_HEADER.size + 4 * first, count)
            if (lengths < 0).any():
                number = first + int((lengths < 0).argmax())
                raise self._damage(f"document {number} has {lengths[number - first]} tokens")
            ends = np.cumsum(lengths, dtype=np.int64) * itemsize + end
            starts = self._read("<i8", self._starts + 8 * first, count)
            wrong = starts != np.concatenate(([end], ends[:-1]))
            if wrong.any():
                number = first + int(wrong.argmax())
                raise self._damage(
                    f"document {number} starts at byte {starts[number - first]}, but the documents before it end at "
                    f"byte {end if number == first else ends[number - first - 1]}"
                )
            end = int(ends[-1])
            if end > binary_size:  # also keeps sums of hostile lengths below 2^63
                break
        return end

    def _check_bounds(self) -> None:
        """Bounds begin with 0, rise, and end with the number of sequences."""
        before = 0
        for first in range(0, self.index.bounds, _BLOCK):
            bounds = self._read("<i8", self._bounds + 8 * first, min(_BLOCK, self.index.bounds - first))
            falls = np.diff(bounds, prepend=before) < 0
            if falls.any() or (first == 0 and bounds[0] != 0):
                number = first + int(falls.argmax())
                raise self._damage(f"the bounds of its documents do not rise from 0 (bound {number})")
            before = int(bounds[-1])
        if before != self.index.sequences:
            raise self._damage(f"its last document ends at {before} of {self.index.sequences} sequences")


class TokenFile(IndexedDataset):
    """Megatron's indexed data set, whose tokens are checked when they are read."""

    def __init__(self, prefix: str, true_vocab: int | None = None) -> None:
        """Open the files.

        Args:
            prefix: PREFIX of .bin and .idx.
            true_vocab: ids from here up are errors; None checks for negative ids only.

        Raises:
            MkdDataError: see `check_index`.
        """
        check_index(prefix)
        self.true_vocab = true_vocab
        super().__init__(prefix, mmap=False)

    def initialize(self, path_prefix: str, *args: Any) -> None:
        """Called by megatron when the files are opened, in workers that unpickle this object too."""
        super().initialize(path_prefix, *args)
        self.bin_reader = _BinReader(path_prefix)
        self._guard = SizeGuard([f"{path_prefix}.idx"])  # megatron maps it

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.true_vocab, *super().__getstate__())

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.true_vocab, *rest = state
        super().__setstate__(tuple(rest))

    def __getitem__(self, idx: Any) -> Any:
        tokens = super().__getitem__(idx)
        if isinstance(idx, int | np.integer):
            self._check(tokens, idx)
        return tokens

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of a sequence from `offset` on.

        Raises:
            MkdDataError: an id is negative or not in the vocabulary, or a file became shorter.
        """
        if (problem := self._guard.problem()) is not None:
            raise MkdDataError(f"--data-path {self.path_prefix}: {problem}")
        whole = int(self.sequence_lengths[idx])
        end = whole if length is None else int(offset) + int(length)
        if not 0 <= offset <= end <= whole:
            raise MkdDataError(
                f"--data-path {self.path_prefix}: tokens {offset} to {end} of document {idx} are wanted, which has "
                f"{whole}: the index files of its rows are damaged; delete them (--data-cache-path, or the folder "
                "cache beside the data)"
            )
        tokens = super().get(idx, offset, length)
        self._check(tokens, idx)
        return tokens

    def _check(self, tokens: np.ndarray, number: int) -> None:
        if not len(tokens):
            return
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or (self.true_vocab is not None and largest >= self.true_vocab):
            vocabulary = "" if self.true_vocab is None else f", but the model's vocabulary has {self.true_vocab} tokens"
            raise MkdDataError(
                f"--data-path {self.path_prefix}: document {number} has token id "
                f"{smallest if smallest < 0 else largest}{vocabulary}: {self.path_prefix}.bin is damaged, or was made "
                "with another tokenizer; make it again (mkd preprocess)"
            )


class _BinReader:
    """Reads PREFIX.bin with `pread`; see the top of this file."""

    def __init__(self, prefix: str) -> None:
        self._path = f"{prefix}.bin"
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """[count] ids at a byte offset."""
        left, position, parts = int(count) * np.dtype(dtype).itemsize, int(offset), []
        while left > 0:
            part = os.pread(self._descriptor, min(left, _READ), position)
            if not part:
                raise MkdDataError(
                    f"{self._path} was truncated while it is read: it ends at byte {os.fstat(self._descriptor).st_size}"
                    f", and {left} bytes are missing; make it again, and start the job again"
                )
            parts.append(part)
            left, position = left - len(part), position + len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
