"""The measured peak of device memory, with what CUDA graphs hold, on a stand-in for PyTorch's allocator."""

from dataclasses import dataclass, field

import pytest
import torch

from mkd.report.peak_memory import PeakMemory


@dataclass
class Allocator:
    """Numbers of the allocator, in bytes."""

    allocated: int = 0
    most: int = 0
    graphs: list[tuple[int, int]] = field(default_factory=list)
    """(size, allocated bytes) of the segments of graphs."""
    snapshots: int = 0

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.most

    def memory_reserved(self) -> int:
        return 100 + sum(size for size, _ in self.graphs)

    def memory_snapshot(self) -> list[dict]:
        self.snapshots += 1
        segments = [dict(total_size=size, allocated_size=used, segment_pool_id=(0, 1)) for size, used in self.graphs]
        return [dict(total_size=100, allocated_size=self.allocated, segment_pool_id=(0, 0)), *segments]

    def reset_peak_memory_stats(self) -> None:
        self.most = self.allocated


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "memory_snapshot"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset_peak_memory_stats)
    return found


def test_a_job_without_graphs_takes_no_snapshot(allocator: Allocator) -> None:
    allocator.allocated, allocator.most, allocator.graphs = 30, 70, [(50, 0)]
    assert PeakMemory(captures=False).measure() == 70
    assert allocator.snapshots == 0


def test_graphs_are_added_to_the_steps_after_their_capture(allocator: Allocator) -> None:
    memory = PeakMemory(captures=True)
    allocator.allocated, allocator.most = 30, 70
    assert memory.measure() == 70
    allocator.graphs = [(50, 10)]  # captured in this step, which needed what the graph now holds
    assert memory.measure() == 70
    allocator.most = 45
    assert [memory.measure(), memory.measure()] == [45 + 40] * 2
    assert allocator.snapshots == 2


def test_a_capture_before_the_only_measurement_counts(allocator: Allocator) -> None:
    allocator.allocated, allocator.most, allocator.graphs = 30, 35, [(50, 10)]
    assert PeakMemory(captures=True).measure() == 30 + 40
