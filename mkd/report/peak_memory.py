"""The most device memory that was in use, that of CUDA graphs included."""

import torch


def graph_bytes() -> int:
    """Bytes that CUDA graphs hold. The allocator counts most of them as free: they hold tensors of the next replay."""
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] - one["allocated_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


class PeakMemory:
    """The peak of this process since its start, in bytes.

    Args:
        captures: True if the job captures CUDA graphs.
    """

    def __init__(self, captures: bool) -> None:
        self._captures = captures
        self._most = self._reserved = self._in_graphs = 0

    def measure(self) -> int:
        """The peak until now. Does not wait for the device."""
        used = torch.cuda.max_memory_allocated()
        if not self._captures:
            return used
        grown = False
        if self._reserved != (reserved := torch.cuda.memory_reserved()):  # a snapshot takes long: only after a change
            self._reserved, in_graphs = reserved, graph_bytes()
            grown, self._in_graphs = in_graphs != self._in_graphs, in_graphs
        # Steps until a capture have what the graph replaces, and the graph at their end: not both at a time.
        with_graphs = torch.cuda.memory_allocated() if grown else used
        self._most = max(self._most, used, with_graphs + self._in_graphs)
        if grown:
            torch.cuda.reset_peak_memory_stats()
        return self._most
