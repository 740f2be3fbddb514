"""Hidden states of a step's microbatches between the teacher's passes, which run first, and the student's.

On the device they need memory for all microbatches of the step. In host memory, a few of them are on the device at a
time, however many microbatches there are: each is copied to the host while the teacher computes the next ones, and back
while the student computes those before it.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ON_DEVICE = 8
"""Microbatches up to which `auto` keeps all hidden states on the device."""
LEAVING = 2
"""Hidden states that are being copied to the host at a time."""
AHEAD = 1
"""Hidden states that are copied back before the student needs them."""
ON_DEVICE = max(LEAVING, AHEAD + 1) + 1
"""Hidden states that are on the device at a time, with one that is computed or used."""


class _Copy(NamedTuple):
    hidden: Tensor
    """On the device."""
    done: torch.cuda.Event


class HostStates:
    """Hidden states in pinned host memory, by the number of their microbatch.

    Copies run on a stream of their own, and the host waits for none of them. The computing stream waits for a copy
    before the tensor on the device is freed: its memory is then reused at once, instead of whenever the host happens to
    observe the end of the copy.
    """

    def __init__(self) -> None:
        self._host: dict[int, Tensor] = {}
        self._leaving: deque[_Copy] = deque()
        self._stream = torch.cuda.Stream()

    def __setitem__(self, number: int, hidden: Tensor) -> None:
        if len(self._leaving) == LEAVING:
            self._finish(self._leaving.popleft())
        host = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu", pin_memory=True)
        self._host[number] = host
        self._leaving.append(_Copy(hidden, self._copy(hidden, host)))

    def __len__(self) -> int:
        return len(self._host)

    def in_order(self) -> Iterator[Tensor]:
        """Yields them on the device, in the order of the microbatches."""
        while self._leaving:
            self._finish(self._leaving.popleft())
        numbers, coming = deque(sorted(self._host)), deque[_Copy]()
        while numbers or coming:
            while numbers and len(coming) <= AHEAD:
                coming.append(self._fetch(numbers.popleft()))
            self._finish(coming[0])
            yield coming.popleft().hidden

    def _fetch(self, number: int) -> _Copy:
        """Start the copy of hidden states to the device."""
        host = self._host[number]
        hidden = torch.empty(host.shape, dtype=host.dtype, device="cuda")
        return _Copy(hidden, self._copy(host, hidden))

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _finish(self, copy: _Copy) -> None:
        """Later work of the computing stream runs after this copy."""
        torch.cuda.current_stream().wait_event(copy.done)


type WaitingStates = dict[int, Tensor] | HostStates
"""Hidden states by the number of their microbatch, on the device or in host memory."""
