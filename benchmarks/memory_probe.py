"""Runs pretrain_kd.py and records torch's allocated memory at certain points of a step, for benchmarks/bench_memory.py.

MKD_MEMORY_PROBE=OUT.json python benchmarks/memory_probe.py FLAGS OF pretrain_kd.py
"""

import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
FILE = "MKD_MEMORY_PROBE"
HELD = "held: weights, gradients, optimizer, teacher"
TEACHER = "teacher forward, beside held"
STUDENT = "activations when the loss begins"
LOSS = "loss, beside activations"
TOTAL = "peak"


@dataclass
class Probe:
    """Allocated bytes at each point of the last training step; the peak is that of the whole run."""

    seen: dict[str, float] = field(default_factory=dict)

    def install(self) -> None:
        """Wrap the teacher's forward pass and the loss."""
        from mkd.teacher.online import OnlineTeacher
        from mkd.train import objective as terms

        OnlineTeacher.signals = self._around(OnlineTeacher.signals, HELD, TEACHER)
        terms.loss_from_hidden = self._around(terms.loss_from_hidden, STUDENT, LOSS)

    def _around(self, work: Callable, before: str, during: str) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            self._keep_peak()
            begin = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = work(*args, **options)
            self.seen |= {before: begin, during: torch.cuda.max_memory_allocated() - begin}
            return result

        return run

    def _keep_peak(self) -> None:
        self.seen[TOTAL] = max(self.seen.get(TOTAL, 0), torch.cuda.max_memory_allocated())

    def write(self, file: Path) -> None:
        """Write the measurements; the student's activations are a difference to the held bytes."""
        self._keep_peak()
        file.write_text(json.dumps({**self.seen, STUDENT: self.seen[STUDENT] - self.seen[HELD]}))


def main() -> None:
    """Train."""
    sys.path.insert(0, str(ROOT))
    from mkd import cpu

    if cpu.wanted():
        cpu.activate()
    probe = Probe()
    probe.install()
    sys.argv[0] = str(ROOT / "pretrain_kd.py")
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    probe.write(Path(os.environ[FILE]))


if __name__ == "__main__":
    main()
