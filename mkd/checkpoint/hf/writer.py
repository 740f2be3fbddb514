"""Writing a Hugging Face folder tensor by tensor: nothing is visible before everything is written."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from mkd.checkpoint.hf.folder import DTYPES, INDEX, WEIGHTS
from mkd.errors import MkdCheckpointError

SHARD_BYTES = 5_000_000_000
PARALLEL_SHARD_BYTES = 250_000_000
"""Where several processes write, files are cut smaller so that each has some, but not smaller than this."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Plan = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> shape and dtype, in the order in which they will be written."""


def plan_bytes(plan: Plan) -> int:
    """Bytes of all tensors of a plan."""
    return sum(_nbytes(*tensor) for tensor in plan.values())


def check_output(path: Path, flag: str) -> None:
    """Raise `MkdCheckpointError` unless `path` is free: absent, or an empty folder that can be replaced."""
    if path.is_mount():
        raise MkdCheckpointError(f"{flag} {path} is where a file system is mounted; give a folder inside it")
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        raise MkdCheckpointError(f"{flag} {path} exists and is not empty; give a new folder, or remove it")


class StagedFolder:
    """A folder filled under a temporary name beside `path` and renamed to `path` at the end.

    After an exception inside the `with` block nothing is left. What a killed process left is removed by the next one.
    """

    def __init__(self, path: Path, flag: str) -> None:
        check_output(path, flag)
        path = path.resolve()  # a link to an empty folder could not be replaced by a folder
        self.final = path
        self.path = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> Self:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            os.replace(self.path, self.final)
        else:
            shutil.rmtree(self.path, ignore_errors=True)


class WeightsWriter:
    """Writes the safetensors files of `plan` into `folder`: one file, or shards of at most `shard_bytes` with an index.

    Call `write` once for each tensor of `names`, in this order, then `close`. Only one tensor is in memory at a time.
    Of several processes each writes every `parts`-th file from number `part` on; the first also writes the index.
    """

    def __init__(self, folder: Path, plan: Plan, shard_bytes: int = SHARD_BYTES, part: int = 0, parts: int = 1) -> None:
        self._folder, self._plan, self._is_first = folder, plan, part == 0
        if parts > 1:
            shard_bytes = min(shard_bytes, max(PARALLEL_SHARD_BYTES, -(-plan_bytes(plan) // parts)))
        self._shards = _cut(plan, shard_bytes)
        self._names = self._file_names()
        self._todo = [(n, name) for n, names in enumerate(self._shards) if n % parts == part for name in names]
        self.names = [name for _, name in self._todo]
        self._next = 0
        self._file: BinaryIO | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Append one tensor."""
        shard, expected = self._todo[self._next]
        shape, dtype = self._plan[name]
        assert name == expected and tuple(tensor.shape) == shape and tensor.dtype == dtype, (name, expected)
        if name == self._shards[shard][0]:
            self._start_file(shard)
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tofile(self._file)
        self._next += 1

    def close(self) -> None:
        """Finish the last file and write the index."""
        assert self._next == len(self._todo), f"{len(self._todo) - self._next} tensors were not written"
        if self._file is not None:
            self._file.close()
        if len(self._shards) == 1 or not self._is_first:
            return
        weight_map = {name: self._names[shard] for shard, names in enumerate(self._shards) for name in names}
        index = {"metadata": {"total_size": plan_bytes(self._plan)}, "weight_map": weight_map}
        write_json(self._folder / INDEX, index)

    def _file_names(self) -> list[str]:
        count = len(self._shards)
        return [WEIGHTS] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]

    def _start_file(self, shard: int) -> None:
        if self._file is not None:
            self._file.close()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._shards[shard]:
            shape, dtype = self._plan[name]
            begin, end = end, end + _nbytes(shape, dtype)
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # tensors start at a multiple of 8 bytes
        self._file = (self._folder / self._names[shard]).open("wb")
        self._file.write(len(raw).to_bytes(8, "little") + raw)
        self._file.flush()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as Hugging Face folders have it: indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config_with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json with the weights' dtype, under the key it already has (`dtype` since transformers 4.56)."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _cut(plan: Plan, shard_bytes: int) -> list[list[str]]:
    """Consecutive tensors into files of at most `shard_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[str]] = []
    size = 0
    for name, tensor in plan.items():
        nbytes = _nbytes(*tensor)
        if not shards or size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards
