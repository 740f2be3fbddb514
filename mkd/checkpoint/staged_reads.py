"""Reads of safetensors files that end on a GPU: by several threads, through buffers that are allocated once.

A tensor that is read into new host memory costs page faults for each byte and a copy to the device that waits for the
driver's own buffers. Here the bytes go from the file (usually from the page cache) into a pinned buffer and from there
to the device, where the tensors of a parameter are put together.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue

import torch
from torch import Tensor

from mkd.checkpoint.safetensors_files import TensorEntry, TransposedEntry

READERS = 4
"""Threads of a rank that read."""
BUFFER_BYTES = 32 * 2**20
AHEAD_BYTES = 2**30
"""Results of `Staging.in_order` that may wait at one time, unless one alone is larger."""


class Staging:
    """Buffers in pinned host memory, one per reading thread."""

    @classmethod
    def to(cls, device: torch.device) -> "Staging | None":
        """Buffers for a GPU; None for the CPU, where a read ends in host memory anyway."""
        return cls(device) if device.type == "cuda" else None

    def __init__(self, device: torch.device, buffers: int = READERS, nbytes: int = BUFFER_BYTES) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        """That of the thread that makes the buffers, on which all work of the device is done; None on the CPU."""
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"))

    def read(self, entry: TensorEntry, rows: slice | None, cols: slice | None) -> Tensor:
        """A block of a tensor on the device; see `HFFolder.read`.

        Raises:
            OSError: the file ends before the tensor does.
        """
        is_part = not entry.shape or (cols is not None and cols != slice(0, entry.shape[1]))
        if is_part or isinstance(entry, TransposedEntry):
            return entry.read(rows, cols).to(self.device)
        first, last, _ = (rows or slice(None)).indices(entry.shape[0])
        out = torch.empty((max(last - first, 0), *entry.shape[1:]), dtype=entry.dtype, device=self.device)
        if out.numel():
            self._fill(out.view(-1).view(torch.uint8), entry, first * (entry.nbytes // entry.shape[0]))
        return out

    def _fill(self, out: Tensor, entry: TensorEntry, start: int) -> None:
        """Read the bytes of a tensor from its byte `start` on into `out` [bytes] on the device."""
        buffer, done = self._free.get(), 0
        on_gpu = self.device.type == "cuda"
        try:
            with torch.cuda.device(self.device) if on_gpu else nullcontext(), entry.file.open("rb", 0) as file:
                file.seek(entry.offset + start)
                while done < len(out):
                    part = buffer[: len(out) - done]
                    count = file.readinto(part.numpy())
                    if not count:
                        raise OSError(f"{entry.file} ends {len(out) - done} bytes before a tensor in it does")
                    out[done : done + count].copy_(part[:count], non_blocking=True)
                    done += count
                    if on_gpu:
                        copied = torch.cuda.Event()
                        copied.record()
                        copied.synchronize()
        finally:
            self._free.put(buffer)

    def in_order[T](self, calls: Iterable[tuple[int, Callable[[], T]]], threads: int = READERS) -> Iterator[T]:
        """The results of calls in their order, computed ahead by `threads` threads.

        Args:
            calls: (bytes of the result, call).
            threads: their number.
        """

        def on_stream(call: Callable[[], T]) -> T:
            # A new thread begins with the default stream, which does not wait for another one, nor that for it.
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                return call()

        waiting: deque[tuple[int, Future[T]]] = deque()
        ahead = 0
        with ThreadPoolExecutor(threads) as pool:
            try:
                for nbytes, call in calls:
                    while waiting and ahead + nbytes > AHEAD_BYTES:
                        ahead -= waiting[0][0]
                        yield waiting.popleft()[1].result()
                    waiting.append((nbytes, pool.submit(on_stream, call)))
                    ahead += nbytes
                while waiting:
                    yield waiting.popleft()[1].result()
            finally:
                for _, future in waiting:
                    future.cancel()
