"""Exports the model of a running job as a Hugging Face folder, from the parameters of all ranks in any layout.

Each parameter is put together on the rank that writes it, one at a time. The ranks describe their shards as for a
checkpoint, so every layout that can be saved can be exported. Each export has Megatron describe the shards again: they
refer to the memory of the parameters.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.checkpoint.hf.export import MODEL_KEYS, ModelTensors, architecture_of
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import ASSET_FILES
from mkd.checkpoint.hf.tables import Item
from mkd.checkpoint.hf.whole_model import WholeModel
from mkd.checkpoint.hf.writer import WeightsWriter, config_with_dtype, write_json
from mkd.checkpoint.ranks import gather_objects, run_on_all_ranks
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import copy_file

_WRITERS = 8
"""Ranks that write files at the same time at most."""


@dataclass(frozen=True)
class LiveModel:
    """The model of a job. See `mkd.checkpoint.hf.whole_model.ModelOrigin`."""

    args: Namespace
    assets_dir: Path | None
    flag: str

    def error(self, text: str) -> MkdCheckpointError:
        """See `ModelOrigin`."""
        return MkdCheckpointError(f"{self.flag}: the student cannot be written as a Hugging Face folder: {text}")


class LiveExport:
    """The present weights of a job's model, to be written by all ranks together."""

    def __init__(self, model: LiveModel, chunks: Sequence[nn.Module]) -> None:
        """Find the parameters. Collective over all ranks.

        Args:
            model: the model.
            chunks: its model chunks on this rank.

        Raises:
            MkdCheckpointError: on all ranks, if the model fits no known Hugging Face architecture, or a rank does not
                find the configuration that the others have.
        """
        self._model = model
        (family, config, args), self._whole = _on_all_ranks(model)
        self._config = family.config_for_transformers_4(config)
        self._tensors = _LiveTensors(chunks, family, args, model.error)
        self._text = self._tensors.plan(None)
        """Tensors without those of a vision tower."""
        self._plan = self._text if self._whole is None else self._whole.plan(self._text)

    def write(self, out: Path) -> None:
        """Write the files into a folder that exists. Collective over all ranks.

        Raises:
            OSError: this rank cannot write its files; it has taken part in all collectives.
        """
        rank, parts = dist.get_rank(), min(_WRITERS, dist.get_world_size())
        writer = _PatientWriter(out, self._plan, rank, parts)
        stored = {name: name if self._whole is None else self._whole.stored(name) for name in self._text}
        self._tensors.owners = {name: writer.part_of[stored[name]] for name in self._text}
        for name, tensor in self._tensors.read(self._text):
            if self._tensors.owners[name] == rank:
                tensor = tensor.cpu()
                writer.write(stored[name], tensor if self._whole is None else self._whole.as_stored(name, tensor))
        if self._whole is not None:
            for name, tensor in self._whole.carried(writer.names):
                writer.write(name, tensor)
        writer.close()
        if rank == 0:
            self._write_small_files(out)

    def _write_small_files(self, out: Path) -> None:
        assets = self._model.assets_dir
        for file in ASSET_FILES:
            if assets is not None and (assets / file).is_file():
                copy_file(assets / file, out / file)
        dtype = next(iter(self._plan.values()))[1]
        config = config_with_dtype(self._config, dtype) if self._whole is None else self._whole.config(dtype)
        write_json(out / "config.json", config)


def _on_all_ranks(model: LiveModel) -> tuple[tuple[Family, dict[str, Any], dict[str, Any]], WholeModel | None]:
    """The architecture, and the model around a text model, as all ranks find them. Collective over all ranks."""
    found: list[Any] = []
    problems = run_on_all_ranks(lambda: found.append((architecture_of(model), WholeModel.of_checkpoint(model))))
    if (problem := next(filter(None, problems), None)) is not None:
        raise MkdCheckpointError(problem)
    ((family, config, _), whole), *_ = found
    seen = gather_objects((family.model_type, config, whole is None))
    if (rank := next((rank for rank, one in enumerate(seen) if one != seen[0]), None)) is not None:
        raise model.error(
            f"rank {rank} finds another configuration in {model.assets_dir} than rank 0: all nodes must see this folder"
        )
    return found[0]


class _PatientWriter:
    """A `WeightsWriter` that raises its first error in `close`: the other ranks need this one in their collectives."""

    def __init__(self, out: Path, plan: Mapping[str, Any], rank: int, parts: int) -> None:
        writes = rank < parts
        self._writer = WeightsWriter(out, plan, part=rank if writes else 0, parts=parts)
        self.part_of, self.names = self._writer.part_of, self._writer.names if writes else []
        self._writes, self._problem = writes, None

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, unless there was an error."""
        self._attempt(lambda: self._writer.write(name, tensor))

    def close(self) -> None:
        """Finish, or raise the first error."""
        if self._writes:
            self._attempt(self._writer.close)
        if self._problem is not None:
            raise self._problem

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._problem is not None:
            return
        try:
            action()
        except OSError as error:
            self._problem = error


@dataclass(frozen=True)
class _Box:
    """A shard's place in the whole tensor."""

    key: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shard: ShardedTensor) -> "_Box":
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        return cls(shard.key, shard.dtype, tuple(shard.global_shape), tuple(shard.global_offset), shape)

    def holds(self, index: tuple[int, ...]) -> bool:
        """True if a block at an index of the first axes has elements in the shard."""
        places = zip(index, self.offset, self.shape, strict=False)
        return all(start <= number < start + count for number, start, count in places)


class _LiveTensors(ModelTensors):
    """The parameters of all ranks. Every rank reads all names in the same order."""

    def __init__(
        self, chunks: Sequence[nn.Module], family: Family, args: Mapping[str, Any], error: Callable[[str], Exception]
    ) -> None:
        self._shards: dict[str, list[tuple[_Box, Tensor]]] = {}
        """By key, the shards that this rank has, and no other rank with a lower number."""
        self.owners: Mapping[str, int] = {}
        """Hugging Face name -> the rank that writes it."""
        boxes = []
        for shard in _shards_of(chunks):
            box = _Box.of(shard)
            boxes.append(box)
            self._shards.setdefault(shard.key, []).append((box, shard.data.detach().reshape(box.shape)))
        every = [box for found in gather_objects(boxes) for box in found]
        super().__init__({box.key: (box.whole, box.dtype) for box in every}, family, args, error)
        self._check(every)
        # A shape that is wrong is an error here, on all ranks: while tensors are read, others wait for this rank.
        for _ in _Shapes(self._stored, family, args, error).read(self.plan(None)):
            pass

    def _check(self, boxes: Sequence[_Box]) -> None:
        """Raise unless the shards make up each tensor."""
        held: dict[str, int] = {}
        for box in boxes:
            held[box.key] = held.get(box.key, 0) + math.prod(box.shape)
        for key, count in held.items():
            if count != math.prod(self._stored[key][0]):
                raise self._error(
                    f"the ranks have {count} elements of tensor {key}, whose shape is {self._stored[key][0]}"
                )

    def _blocks(self, item: Item, key: str, index: tuple[int, ...]) -> list[Tensor] | None:
        owners, found = sorted({self.owners[name] for name in item.shapes}), None
        for owner in owners:
            blocks = [self._gather(name, index, owner) for name in item.stored_tensors(key)]
            if owner == dist.get_rank():
                found = blocks
        return found

    def _gather(self, key: str, index: tuple[int, ...], owner: int) -> Tensor:
        """A block, whole on the owner. Each element is on one rank, and 0 on the others: their sum over bytes is it."""
        whole, dtype = self._stored[key]
        block = torch.zeros(whole[len(index) :], dtype=dtype, device="cuda")
        for box, data in self._shards.get(key, ()):
            if box.holds(index):
                local = tuple(number - start for number, start in zip(index, box.offset, strict=False))
                rest = zip(box.offset[len(index) :], box.shape[len(index) :], strict=True)
                block[tuple(slice(start, start + count) for start, count in rest)] = data[local]
        if dist.get_world_size() > 1:
            dist.reduce(block.view(-1).view(torch.uint8), dst=owner)
        return block


class _Shapes(ModelTensors):
    """Tensors without memory."""

    def _blocks(self, item: Item, key: str, index: tuple[int, ...]) -> list[Tensor]:
        stored = [self._stored[name] for name in item.stored_tensors(key)]
        return [torch.empty(shape[len(index) :], dtype=dtype, device="meta") for shape, dtype in stored]


def _shards_of(chunks: Sequence[nn.Module]) -> list[ShardedTensor]:
    """The shards of a model on this rank that it saves in a checkpoint."""
    found = []
    for chunk in chunks:
        state = unwrap_model(chunk).sharded_state_dict(metadata=dict(_METADATA))
        apply_factories(state)
        found += [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    return [shard for shard in found if shard.key.startswith(MODEL_KEYS) and is_main_replica(shard.replica_id)]


_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""megatron.training's description of the form of its checkpoints, as far as models read it."""
