"""Writes a Hugging Face folder tensor by tensor; the folder appears under its name only when it is complete."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from mkd.checkpoint.hf.folder import INDEX, WEIGHTS
from mkd.checkpoint.safetensors_files import tensor_bytes, write_header
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import new_folder, partial_path

SHARD_BYTES = 5_000_000_000
PARALLEL_SHARD_BYTES = 250_000_000
"""With several writing processes, files are smaller so that every process has some, but not smaller than this."""

Plan = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> shape and dtype, in the order of writing."""


def plan_bytes(plan: Plan) -> int:
    """Bytes of all tensors of a plan."""
    return sum(tensor_bytes(*tensor) for tensor in plan.values())


def check_output(path: Path, flag: str) -> None:
    """Refuse an output path that is in use.

    Raises:
        MkdCheckpointError: `path` exists and is not an empty folder, or is a mount point, which cannot be replaced.
    """
    if path.is_mount():
        raise MkdCheckpointError(f"{flag} {path} is where a file system is mounted; give a folder inside it")
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        raise MkdCheckpointError(f"{flag} {path} exists and is not empty; give a new folder, or remove it")


class StagedFolder:
    """A folder filled under a temporary name beside `path` and renamed to `path` at the end.

    After an exception inside the `with` block nothing is left. The leftovers of a killed process are removed by the
    next one that writes to the same path.
    """

    def __init__(self, path: Path, flag: str) -> None:
        check_output(path, flag)
        path = path.resolve()  # a link to an empty folder could not be replaced by a folder
        self.final = path
        self.path = partial_path(path)
        self._folder = new_folder(path)

    def __enter__(self) -> Self:
        self._folder.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._folder.__exit__(kind, error, tb)


class WeightsWriter:
    """Writes the safetensors files of `plan` into `folder`: one file, or shards of at most `shard_bytes` with an index.

    Call `write` once per tensor of `names`, in this order, then `close`. Only one tensor is in memory at a time. With
    several processes, process `part` of `parts` writes every `parts`-th file, beginning with number `part`; process 0
    also writes the index.
    """

    def __init__(self, folder: Path, plan: Plan, shard_bytes: int = SHARD_BYTES, part: int = 0, parts: int = 1) -> None:
        self._folder, self._plan, self._is_first = folder, plan, part == 0
        if parts > 1:
            shard_bytes = min(shard_bytes, max(PARALLEL_SHARD_BYTES, -(-plan_bytes(plan) // parts)))
        self._shards = _assign_to_files(plan, shard_bytes)
        self._names = self._file_names()
        self.part_of = {name: n % parts for n, names in enumerate(self._shards) for name in names}
        """The process that writes each tensor."""
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
        self._file = (self._folder / self._names[shard]).open("wb")
        self._file.write(write_header({name: self._plan[name] for name in self._shards[shard]}))
        self._file.flush()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON in the style of Hugging Face folders: indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config_with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json with the weights' dtype, under the keys that are present (`dtype` since transformers 4.56)."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}


def _assign_to_files(plan: Plan, shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file: consecutive, at most `shard_bytes`; a larger tensor has its own file."""
    shards: list[list[str]] = []
    size = 0
    for name, tensor in plan.items():
        nbytes = tensor_bytes(*tensor)
        if not shards or size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards
