"""safetensors files, read block by block and written tensor by tensor.

The safetensors library maps a whole file and writes whole dictionaries. mkd needs less memory than that: a rank reads
only its own slices, and a writer holds one tensor at a time. Format: 8 bytes little-endian header length, a JSON header
(tensor name -> dtype, shape, offsets), then the bytes of the tensors without gaps.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.errors import MkdCheckpointError
from mkd.utils.json_files import parse_json
from mkd.utils.lfs_pointers import LFS_HINT, LFS_POINTER

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


@dataclass(frozen=True)
class TensorEntry:
    """Location of one tensor: `offset` and `nbytes` count bytes inside `file`."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    def read(self, rows: slice | None, cols: slice | None) -> Tensor:
        """A copy of a block of the tensor; see `HFFolder.read`."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)[rows or slice(None)]
        # Mapped for this one read: pages of a file that stays mapped count as memory of the process.
        kind = np.dtype(f"i{self.dtype.itemsize}")
        mapped = np.memmap(self.file, kind, mode="r", offset=self.offset, shape=(self.nbytes // kind.itemsize,))
        view = mapped.reshape(self.shape)
        block = () if not self.shape else (rows or slice(None), *([] if cols is None else [cols]))
        return torch.from_numpy(np.array(view[block])).view(self.dtype)


@dataclass(frozen=True)
class TransposedEntry(TensorEntry):
    """A tensor [a, b, c] that is stored as [a, c, b]; `shape` and the blocks of `read` are those of [a, b, c]."""

    @classmethod
    def of(cls, stored: TensorEntry) -> "TransposedEntry":
        """The entry of a stored tensor of three dimensions."""
        first, second, third = stored.shape
        return cls(stored.file, (first, third, second), stored.dtype, stored.offset, stored.nbytes)

    def read(self, rows: slice | None, cols: slice | None) -> Tensor:
        """A copy of a block of the tensor; see `HFFolder.read`."""
        first, second, third = self.shape
        stored = TensorEntry(self.file, (first, third, second), self.dtype, self.offset, self.nbytes)
        return stored.read(rows, None).transpose(1, 2)[:, cols or slice(None)].contiguous()


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def write_header(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    """The beginning of a file that holds `tensors` (name -> shape, dtype) in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + tensor_bytes(shape, dtype)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # tensors start at a multiple of 8 bytes
    return len(raw).to_bytes(8, "little") + raw


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file of tensors that are in memory."""
    with path.open("wb") as file:
        file.write(write_header({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}))
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_header(path: Path, flag: str) -> dict[str, TensorEntry]:
    """The tensors of one file, after a check that the file is complete.

    Raises:
        MkdCheckpointError: naming the file, when the header is cut off or is not JSON, when tensors overlap or leave
            gaps, and when the length of the file differs from the one that the header implies.
    """
    with path.open("rb") as file:
        return _entries(path, flag, path.stat().st_size, file.read)


def read_tensors(content: bytearray, path: Path, flag: str, most_header: int) -> dict[str, Tensor]:
    """The tensors of a file whose bytes are in memory, which they share where its dtype allows that.

    Raises:
        MkdCheckpointError: see `read_header`; or the header has more bytes than `most_header`.
    """
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        position += count
        return bytes(content[position - count : position])

    tensors = {}
    for name, entry in _entries(path, flag, len(content), read, most_header).items():
        stored = torch.frombuffer(content, dtype=torch.uint8)[entry.offset : entry.offset + entry.nbytes]
        aligned = stored.clone() if entry.offset % entry.dtype.itemsize else stored
        tensors[name] = aligned.view(entry.dtype).view(entry.shape)
    return tensors


def _entries(
    path: Path, flag: str, size: int, read: Callable[[int], bytes], most_header: int = _MAX_HEADER_BYTES
) -> dict[str, TensorEntry]:
    """The tensors of a file of `size` bytes; `read` returns its next bytes, from the first on."""

    def fail(text: str) -> MkdCheckpointError:
        return MkdCheckpointError(f"{flag}: {path} {text}")

    first = read(8)
    length = int.from_bytes(first, "little")
    if size < 8 or length > most_header:
        if first + read(len(LFS_POINTER) - len(first)) == LFS_POINTER:
            raise fail(f"is {LFS_HINT}")
        raise fail(f"is not a safetensors file ({size} bytes, header length {length})")
    if size < 8 + length:
        raise fail(f"is truncated inside its header: {8 + length} bytes expected, {size} found")
    try:
        header = parse_json(read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, info) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise fail(f"has a damaged safetensors header ({error!r})") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise fail(f"has a damaged safetensors header (tensor {name} starts at byte {entry.offset}, not {end})")
        end += entry.nbytes
    if size != end:
        raise fail(f"is {'truncated' if size < end else 'too long'}: {end} bytes expected, {size} found")
    return entries


def _entry(path: Path, base: int, info: dict[str, Any]) -> TensorEntry:
    dtype, shape = DTYPES[info["dtype"]], tuple(info["shape"])
    begin, end = info["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {list(shape)} at {[begin, end]}")
    if end - begin != math.prod(shape) * dtype.itemsize:  # torch's product wraps around at 2^64
        raise ValueError(f"{end - begin} bytes for a {info['dtype']} tensor of shape {list(shape)}")
    return TensorEntry(path, shape, dtype, base + begin, end - begin)
