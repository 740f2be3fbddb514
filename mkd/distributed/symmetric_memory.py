"""Sums of small tensors over two GPUs of a host through memory that they read from each other.

A forward pass over one token per text has two sums per layer. PyTorch's kernel over symmetric memory
(`torch.distributed._symmetric_memory`) needs 9.5 us for 256 KB where NCCL needs 15.7, and a CUDA graph can hold it.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from mkd.utils.logging import logger

_RANKS = 2
"""Ranks of a group; others have not been measured."""
_MOST_BYTES = 512 << 10
"""Larger tensors are left to NCCL: with sums of 1 MB, rollouts were faster with it."""
_ALIGNMENT = 16
"""Divisor of the bytes of a tensor."""


class SymmetricGroup(ProcessGroup):
    """A group that sums small tensors through symmetric memory, in place, and leaves all else to another group."""

    def __init__(self, group: ProcessGroup, buffer: Tensor) -> None:
        """A group of the same ranks.

        Args:
            group: the ranks, of one host.
            buffer: [bytes] uint8 symmetric memory of the group; sums of larger tensors are left to `group`.
        """
        super().__init__(group.rank(), group.size())
        self._group, self._buffer = group, buffer

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> Work | None:
        """See `torch.distributed.all_reduce`; a sum is enqueued on the current stream, and there is no work to wait
        for."""
        (tensor,) = tensors
        if options.asyncOp or options.reduceOp != dist.ReduceOp.SUM or not self._fits(tensor):
            return self._group.allreduce(tensors, options)
        shared = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, tensor, "sum", self._group.group_name, out=tensor)
        return None

    def _fits(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype in (torch.float32, torch.bfloat16)
            and tensor.is_cuda
            and tensor.is_contiguous()
            and 0 < tensor.nbytes <= self._buffer.nbytes
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.data_ptr() % _ALIGNMENT == 0
        )

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: AllgatherOptions) -> Work | None:
        """See `torch.distributed.all_gather_into_tensor`."""
        return self._group._allgather_base(output, tensor, options)


def symmetric_group(group: ProcessGroup, size: int) -> ProcessGroup:
    """A group of the same ranks that sums tensors of up to `size` bytes through symmetric memory, if they are small.

    Returns `group` itself where that is impossible or slower: on CPU, with more than two ranks, between hosts, and
    between GPUs without access to each other's memory. Collective over the group.
    """
    if group.size() != _RANKS or dist.get_backend(group) != "nccl" or not _has_kernel():
        return group
    if not _reaches_peers(group):
        return group
    # The kernel does without NVLink multicast, which not every host with NVSwitch can provide.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric_memory

    reason = None
    try:
        size = min(size, _MOST_BYTES)
        device = torch.device("cuda", torch.cuda.current_device())
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, group)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    if not _holds_on_all(reason is None, group):
        reason = reason or "another rank has none"
        logger.warning("Rollouts sum over tensor-parallel ranks by NCCL, not by symmetric memory: %s", reason)
        return group
    return SymmetricGroup(group, buffer)


def _has_kernel() -> bool:
    """True with this version of PyTorch."""
    return hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out")


def _reaches_peers(group: ProcessGroup) -> bool:
    """True if all ranks are on GPUs of one host, which all processes see, with access to each other's memory.

    A rank on another host, or one that sees other GPUs, has a GPU whose UUID this process does not find.
    """
    own = torch.cuda.current_device()
    mine = torch.tensor([own, _device_key(own)], device="cuda")
    every = mine.new_empty(group.size(), 2)
    dist.all_gather_into_tensor(every, mine, group=group)
    devices = [
        index if index < torch.cuda.device_count() and _device_key(index) == key else None
        for index, key in every.tolist()
    ]
    reaches = len(set(devices)) == len(devices) and all(
        device is not None and (device == own or torch.cuda.can_device_access_peer(own, device)) for device in devices
    )
    return _holds_on_all(reaches, group)


def _device_key(index: int) -> int:
    """A hash of the UUID of a GPU, as int64."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=8).digest(), "little", signed=True)


def _holds_on_all(condition: bool, group: ProcessGroup) -> bool:
    found = torch.tensor(int(condition), device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return bool(found.item())
