"""Writes a torch_dist checkpoint tensor by tensor: each block is created when it is written, and freed afterward.

Megatron's own writer holds all tensors at once. Here `LazyTensors` declares names, shapes and offsets, and a planner
creates each block on request, so that an import needs the memory of one parameter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from mkd.errors import MkdCheckpointError, MkdError
from mkd.utils.atomic_files import free_bytes


class LazyTensors:
    """Declarations of the tensors to save, each with a function that creates its values."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, tuple[int, ...]], Callable[[], Tensor]] = {}
        self.sharded: dict[str, ShardedTensor | ShardedObject] = {}
        """Argument of `megatron.core.dist_checkpointing.save`; the data are on the meta device."""

    def add(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        axes: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Add one block of the tensor `key`.

        Args:
            key: name of the tensor in the checkpoint.
            shape: shape of the block, without the leading axes.
            dtype: dtype of the tensor.
            make: returns the block [shape] in `dtype`; called once, when it is written.
            axes: (index of this block, size) of each leading axis of the tensor.
        """
        index, sizes = tuple(i for i, _ in axes), tuple(size for _, size in axes)
        offset = (*index, *(0 for _ in shape))
        data = torch.empty(*(1 for _ in axes), *shape, dtype=dtype, device="meta")
        fragments = (*sizes, *(1 for _ in shape))
        name = f"{key} {offset}"
        self.sharded[name] = ShardedTensor(key, data, dtype, tuple(data.shape), (*sizes, *shape), offset, fragments)
        self._blocks[key, offset] = lambda: make().reshape(data.shape)
        module, _, last = key.rpartition(".")
        if last == "weight" and ".linear_" in module:
            # megatron's linear layers load an extra state beside their weight; it is empty here.
            offset, shape = (index, sizes) if axes else ((0,), (1,))
            state = f"{module}._extra_state"
            self.sharded[f"{state} {offset}"] = ShardedObject(state, None, shape, offset)

    def make(self, key: str, offset: tuple[int, ...]) -> Tensor:
        """The block of `key` at `offset`."""
        return self._blocks[key, offset]()


def save(path: Path, common: dict[str, Any], tensors: LazyTensors) -> None:
    """Write a checkpoint in megatron's format, one tensor at a time. Collective over all ranks.

    Args:
        path: an empty folder.
        common: the values that are not tensors, such as the arguments; the same on every rank.
        tensors: the tensors of this rank.

    Raises:
        MkdError: of a function that creates a block; or the files cannot be written.
    """
    try:
        dist_checkpointing.save(
            {**common, "model": tensors.sharded},
            str(path),
            _LazyStrategy(tensors),
            content_metadata={"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
        )
    except (CheckpointException, RuntimeError, OSError) as error:
        failures = getattr(error, "failures", None)  # of torch, per rank
        cause = next(iter(failures.values()))[0] if failures else error
        if isinstance(cause, MkdError | torch.OutOfMemoryError | MemoryError):
            raise cause from error
        free = free_bytes(path)
        space = "" if free is None else f", {free / 2**30:.3f} GiB are free there"
        raise MkdCheckpointError(
            f"{path} cannot be written ({type(cause).__name__}: {' '.join(str(cause).split())[:300]}){space}"
        ) from error


class _LazyStrategy(TorchDistSaveShardedStrategy):
    """Megatron's format, written by torch's own writer: megatron's writer requires all tensors before it starts."""

    def __init__(self, tensors: LazyTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Called by megatron with the state dict to save."""
        state: dict[str, list[Any]] = {}
        for value in _leaves(sharded_state_dict):
            state.setdefault(value.key if isinstance(value, ShardedTensor) else value.unique_key, []).append(value)
        dcp.save(
            mcore_to_pyt_state_dict(state),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=_LazyPlanner(self._tensors),
        )


def _leaves(state: dict[str, Any]) -> list[Any]:
    return [leaf for value in state.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


class _LazyPlanner(MCoreSavePlanner):
    def __init__(self, tensors: LazyTensors) -> None:
        # Decentralized planning is megatron's; torch's writer requires one rank to plan for all.
        super().__init__(can_run_decentralized_global_plan=False, flatten_state_dict=False)
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Called by the writer, once per item."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._tensors.make(write_item.index.fqn, tuple(write_item.index.offset))
