"""Memory of the GPUs of a host that all ranks of a group read and write directly (PyTorch's symmetric memory)."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class NoPeerMemory(RuntimeError):
    """The GPUs of a group cannot share memory; the message is the reason, the same kind on all ranks."""


def peer_memory(group: ProcessGroup, size: int) -> tuple[Tensor, ...]:
    """[size] uint8 zeros of each rank, which all ranks read and write. Collective over the group.

    Ranks may write into each other's memory as soon as this returns. It lives as long as a rank holds it.

    Raises:
        NoPeerMemory: the GPUs are of different hosts, or without access to each other's memory.
    """
    own = torch.cuda.current_device()
    if group.size() == 1:
        return (torch.zeros(size, dtype=torch.uint8, device=own),)
    if dist.get_backend(group) != "nccl":
        raise NoPeerMemory(f"the backend of the group is {dist.get_backend(group)}")
    if not _reaches_peers(group):
        raise NoPeerMemory("the GPUs are not of one host, or without access to each other's memory")
    # Loads and stores do without NVLink multicast, which not every host with NVSwitch can provide.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric_memory

    reason, memory = None, ()
    try:
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", own)).zero_()
        torch.cuda.synchronize()  # before another rank writes
        handle = symmetric_memory.rendezvous(buffer, group)
        memory = tuple(
            buffer if rank == group.rank() else handle.get_buffer(rank, (size,), torch.uint8)
            for rank in range(group.size())
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    if not _holds_on_all(reason is None, group):
        raise NoPeerMemory(reason or "another rank has none")
    return memory


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
