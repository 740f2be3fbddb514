"""A Hugging Face model folder: checked before a weight is read, then read slice by slice."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.checkpoint.tokenizer_files import TOKENIZER_FILES, read_json_object, tokenizer_hash
from mkd.errors import MkdCheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ASSET_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

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

# config.json keys that say how a folder was written or is used, not which model it holds
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "pretraining_tp"}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `offset` and `nbytes` count bytes inside `file`."""

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
        where = () if not self.shape else (rows or slice(None), *([] if cols is None else [cols]))
        return torch.from_numpy(np.array(view[where])).view(self.dtype)


class HFFolder:
    """A folder with `config.json` and safetensors weights.

    Construction reads only JSON and the safetensors headers, and raises `MkdCheckpointError` when the folder is
    missing, empty, incomplete or torn. Every message names `flag`, the command-line flag that gave the folder.
    """

    def __init__(self, path: str | os.PathLike, flag: str) -> None:
        self.path = Path(path)
        self.flag = flag
        self._check_folder()
        self.config: dict[str, Any] = read_json_object(self.path / "config.json", flag)
        self._entries = self._read_headers()
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (entry.shape, entry.dtype) for name, entry in self._entries.items()
        }
        self.bytes_read = 0
        """Of tensors, by `read`."""

    def error(self, text: str) -> MkdCheckpointError:
        """An error about this folder that names it and its flag."""
        return MkdCheckpointError(f"{self.flag} {self.path}: {text}")

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """The tensor `name`, or a block of its first (`rows`) and second (`cols`) dimension, as stored, on the CPU.

        Only the bytes of the block are read. Raises `MkdCheckpointError` when the folder has no such tensor.
        """
        if name not in self._entries:
            raise self.error(f"there is no tensor {name}")
        entry = self._entries[name]
        block = entry.read(rows, cols)
        self.bytes_read += block.nbytes
        return block

    def tokenizer_hash(self) -> str | None:
        """128-bit hex hash of the tokenizer's vocabulary, merges and added tokens; None when there is no tokenizer.

        Two folders with equal hashes give the same ids the same meaning. The chat template does not count.
        """
        return tokenizer_hash(self.path, self.flag)

    def fingerprint(self) -> str:
        """128-bit hex hash of config.json and, for each tensor, its name, shape, dtype and 8 KiB of its bytes.

        It does not depend on how the weights are cut into files. Sampling keeps it fast for hundreds of gigabytes; two
        checkpoints of one training run differ in every sampled block.
        """
        digest = hashlib.blake2b(digest_size=16)
        kept = {key: value for key, value in self.config.items() if key not in _VOLATILE_KEYS and value is not None}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for name in sorted(self._entries):
            entry = self._entries[name]
            digest.update(f"{name} {entry.shape} {entry.dtype}".encode())
            with entry.file.open("rb") as file:
                for start in (0, entry.nbytes // 2):
                    file.seek(entry.offset + start)
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.nbytes - start)))
        return digest.hexdigest()

    def assets(self) -> list[Path]:
        """config.json, generation_config.json, tokenizer files and chat template: what an export carries along."""
        return [self.path / name for name in ASSET_FILES if (self.path / name).is_file()]

    def _check_folder(self) -> None:
        if not self.path.exists():
            raise self.error("the folder does not exist")
        if not self.path.is_dir():
            raise self.error("this is a file; give the folder that holds config.json and the safetensors files")
        names = {entry.name for entry in self.path.iterdir()}
        if not names:
            raise self.error("the folder is empty")
        if "config.json" not in names:
            raise self.error("there is no config.json; give the folder of a Hugging Face model")
        if not names & {WEIGHTS, INDEX}:
            raise self.error(f"there is neither {WEIGHTS} nor {INDEX}; other weight formats are not read")

    def _read_headers(self) -> dict[str, TensorEntry]:
        if (self.path / WEIGHTS).is_file():
            return read_safetensors_header(self.path / WEIGHTS, self.flag)
        files = self._indexed_files()
        entries: dict[str, TensorEntry] = {}
        for file, names in files.items():
            header = read_safetensors_header(self.path / file, self.flag)
            for name in names:
                if name not in header:
                    raise self.error(f"{INDEX} places tensor {name} in {file}, which does not contain it")
            for name in header.keys() & entries.keys():
                raise self.error(f"tensor {name} is both in {entries[name].file.name} and in {file}")
            entries.update(header)
        return entries

    def _indexed_files(self) -> dict[str, list[str]]:
        """The shard files that the index names, with the tensors that should be in each."""
        weight_map = read_json_object(self.path / INDEX, self.flag).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self.error(f'{INDEX} has no "weight_map"')
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            # A plain file name cannot leave the folder. Links may: the hub's cache keeps weights behind them.
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\\" in file:
                raise self.error(f"{INDEX} places tensor {name} in {file!r}, which is not a file name in this folder")
            files.setdefault(file, []).append(name)
        for file in files:
            if not (self.path / file).is_file():
                raise self.error(f"{INDEX} names {file}, which is missing")
        return files


def read_safetensors_header(path: Path, flag: str) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, after checking that the file is whole.

    Format: 8 bytes little-endian header length, JSON header, tensor bytes. `MkdCheckpointError` names the file when the
    header is cut off or is not JSON, when tensors overlap or leave gaps, and when the file is not as long as it says.
    """

    def fail(text: str) -> MkdCheckpointError:
        return MkdCheckpointError(f"{flag}: {path} {text}")

    seen = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if seen < 8 or length > _MAX_HEADER_BYTES:
            raise fail(f"is not a safetensors file ({seen} bytes, header length {length})")
        if seen < 8 + length:
            raise fail(f"is truncated inside its header: {8 + length} bytes expected, {seen} seen")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, info) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise fail(f"has a damaged safetensors header ({error!r})") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise fail(f"has a damaged safetensors header (tensor {name} starts at byte {entry.offset}, not {end})")
        end += entry.nbytes
    if seen != end:
        raise fail(f"is {'truncated' if seen < end else 'too long'}: {end} bytes expected, {seen} seen")
    return entries


def _entry(path: Path, base: int, info: dict[str, Any]) -> TensorEntry:
    dtype, shape = DTYPES[info["dtype"]], tuple(info["shape"])
    begin, end = info["data_offsets"]
    if end - begin != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for a {info['dtype']} tensor of shape {list(shape)}")
    return TensorEntry(path, shape, dtype, base + begin, end - begin)
