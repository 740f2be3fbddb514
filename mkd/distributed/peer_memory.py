"""Memory of the GPUs of a host that all ranks of a group read and write directly (PyTorch's symmetric memory)."""

import ctypes
import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_NATIVE_ATOMIC_SUPPORTED = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of CUDA's driver."""


class NoPeerMemory(RuntimeError):
    """The GPUs of a group cannot share memory; the message is the reason, the same kind on all ranks."""


def peer_memory(group: ProcessGroup, size: int) -> tuple[Tensor, ...]:
    """[size] uint8 zeros of each rank, which all ranks read and write. Collective over the group.

    Ranks may write into each other's memory, atomically too, as soon as this returns. It lives as long as a rank holds
    it.

    Raises:
        NoPeerMemory: the GPUs are of different hosts, or reach each other's memory not at all or by PCIe.
    """
    own = torch.cuda.current_device()
    if group.size() == 1:
        return (torch.zeros(size, dtype=torch.uint8, device=own),)
    if dist.get_backend(group) != "nccl":
        raise NoPeerMemory(f"the backend of the group is {dist.get_backend(group)}")
    _raise_on_all(_reason_against_peers(group), group)
    # Loads and stores do without NVLink multicast, which not every host with NVSwitch can provide.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric_memory

    reason, memory = None, ()
    try:
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", own)).zero_()
        torch.cuda.synchronize()  # before another rank writes
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    _raise_on_all(reason, group)  # no rank waits in the rendezvous for one that has no memory
    try:
        handle = symmetric_memory.rendezvous(buffer, group)
        memory = tuple(
            buffer if rank == group.rank() else handle.get_buffer(rank, (size,), torch.uint8)
            for rank in range(group.size())
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    _raise_on_all(reason, group)
    return memory


def _reason_against_peers(group: ProcessGroup) -> str | None:
    """The reason for which this rank does not reach the memory of the others; None if it does.

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
    if None in devices or len(set(devices)) < len(devices):
        return "the GPUs are not different ones of one host that all ranks see"
    peers = [device for device in devices if device != own]
    if not all(torch.cuda.can_device_access_peer(own, peer) for peer in peers):
        return "the GPUs have no access to each other's memory"
    if not all(_has_native_atomics(own, peer) for peer in peers):
        return "the GPUs have no atomic operations on each other's memory"
    return None


def _has_native_atomics(device: int, peer: int) -> bool:
    """True if atomic operations of a GPU on the memory of another one are atomic, as through NVLink, unlike PCIe."""
    value = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
            ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, device, peer
        )
    except (OSError, AttributeError):
        return False
    return status == 0 and value.value == 1


def _device_key(index: int) -> int:
    """A hash of the UUID of a GPU, as int64."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=8).digest(), "little", signed=True)


def _raise_on_all(reason: str | None, group: ProcessGroup) -> None:
    """Raise `NoPeerMemory` on all ranks if one of them has a reason. Collective over the group."""
    found = torch.tensor(int(reason is not None), device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    if found.item():
        raise NoPeerMemory(reason or "another rank has a reason against it")
