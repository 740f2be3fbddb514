"""Optimizer state in host memory while texts are written (--kd-rollout-offload).

The storages of the tensors are emptied and filled again; the tensors themselves stay, so nothing that holds one of them
notices. The copies back run while the teacher and the student compute: nothing reads the state before the optimizer's
step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 1 << 28
"""Bytes of one host buffer at most. Page-locked memory is allocated in powers of two."""
_ALIGNMENT = 256


@dataclass
class StateOffload:
    """Moves moments and main parameters of an optimizer of Megatron to the host and back; parameters of the model,
    which its forward pass reads, and gradients stay."""

    optimizer: Any
    chunks: Sequence[nn.Module]
    """The model chunks that it optimizes."""
    _host: "HostBuffers" = field(default_factory=lambda: HostBuffers())
    _copies: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())

    @contextmanager
    def away(self) -> Iterator[None]:
        """The state is on the host inside the `with` block; `arrive` waits for it afterward."""
        moved = self._leave()
        try:
            yield
        finally:
            self._return(moved)

    def arrive(self) -> None:
        """Let the current stream wait until the state is on the device again. The host does not wait."""
        torch.cuda.current_stream().wait_stream(self._copies)

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of the state that exists now, on the device and in the order of the parameters."""
        device = next(self.chunks[0].parameters()).device
        kept = {one.untyped_storage().data_ptr() for chunk in self.chunks for one in _tensors_of(chunk)}
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in _state_tensors(self.optimizer):
            storage = tensor.untyped_storage()
            # Numbers of steps and the like are smaller than any copy is worth.
            if tensor.device == device and tensor.numel() > 1 and storage.data_ptr() not in kept:
                found[storage.data_ptr()] = storage
        return [storage for storage in found.values() if storage.nbytes() > 0 and storage.resizable()]

    def _leave(self) -> list["_Moved"]:
        moved, start = [], 0
        for storage in self.storages():
            moved.append(_Moved(storage, storage.nbytes(), start))
            start += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._host.reserve(start)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for one in moved:
                for host, device in self._host.pieces(one):
                    host.copy_(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._copies)  # what is allocated next may be the same memory
        for one in moved:
            one.storage.resize_(0)
        return moved

    def _return(self, moved: Sequence["_Moved"]) -> None:
        for one in moved:
            one.storage.resize_(one.nbytes)
        self._copies.wait_stream(torch.cuda.current_stream())  # the memory may still be in use
        with torch.cuda.stream(self._copies):
            for one in moved:
                for host, device in self._host.pieces(one):
                    device.copy_(host, non_blocking=True)


@dataclass(frozen=True)
class _Moved:
    """A storage and its place on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    start: int
    """First byte in the host buffers."""


@dataclass
class HostBuffers:
    """Page-locked host memory, kept for the run."""

    buffers: list[Tensor] = field(default_factory=list)
    """[n] uint8 each; all but the last ones have `_PIECE` bytes."""

    def reserve(self, nbytes: int) -> None:
        """Have this number of bytes at least."""
        missing = nbytes - sum(map(len, self.buffers))
        while missing > 0:
            size = min(_PIECE, 1 << (missing - 1).bit_length())
            self.buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            missing -= size

    def pieces(self, moved: _Moved) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the host and on the device, of each buffer that a storage has a part of."""
        storage = moved.storage
        device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (moved.nbytes,))
        first, begin = 0, moved.start
        end = begin + moved.nbytes
        for buffer in self.buffers:
            last = first + len(buffer)
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield buffer[low - first : high - first], device[low - begin : high - begin]
            first = last


def _tensors_of(chunk: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and gradients of a model chunk."""
    for parameter in chunk.parameters():
        yield parameter
        gradient = getattr(parameter, "main_grad", None)  # in Megatron's buffer
        if gradient is not None:
            yield gradient
    for _, buffer in chunk.named_buffers():  # Megatron's wrapper has another attribute `buffers`
        yield buffer


def _state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Parameters and state of the PyTorch optimizers inside one of Megatron's."""
    for inner in _pytorch_optimizers(optimizer):
        for group in inner.param_groups:
            yield from _tensors_in(group["params"])
        for state in inner.state.values():
            yield from _tensors_in(state.values())


def _pytorch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    if hasattr(optimizer, "chained_optimizers"):
        for one in optimizer.chained_optimizers:
            yield from _pytorch_optimizers(one)
    elif getattr(optimizer, "optimizer", None) is not None:  # a rank may have no parameters
        yield optimizer.optimizer


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
