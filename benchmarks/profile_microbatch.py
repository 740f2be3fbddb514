"""Files of mkd that one microbatch passes through, from Megatron's forward step to the reported means.

    python benchmarks/profile_microbatch.py

Trains one step of one microbatch on the CPU (one rank, models of two layers, dense teacher, eager losses, one loss
chunk) through pretrain_kd.py, and records every call of a Python function of mkd inside `forward_step` of Megatron's
schedule, which runs the teacher, the student and the losses and collects the means. Backward passes and the optimizer
are outside. A transition is a call of a function in another file than the call before it, which is what a reader who
follows the calls has to open; a return is a transition to a file that was entered before. Frames of other packages and
of the CPU backend (mkd/cpu) are not counted.
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT}/mkd/"
CPU_BACKEND = "cpu/"
"""Folder of mkd that every call of torch enters on the CPU and none on a GPU."""
FORWARD_STEP = ("forward_step", "megatron/core/pipeline_parallel/schedules.py")
"""Function of Megatron's schedules, and the end of its file's path; one call of it is one microbatch."""


class Call(NamedTuple):
    """One call of a function of mkd."""

    file: str
    """Path inside `mkd/`."""
    function: str


class Recorder:
    """A function for `sys.setprofile` that keeps the calls of the last training microbatch, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._enclosing: FrameType | None = None
        """The running call of Megatron's `forward_step`."""

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if self._enclosing is None:
            if event == "call" and _is_forward_step(frame.f_code) and _is_training():
                self._enclosing, self.calls = frame, []
        elif event == "return" and frame is self._enclosing:
            self._enclosing = None
        elif event == "call" and (file := _file_of(frame.f_code)) is not None:
            self.calls.append(Call(file, frame.f_code.co_name))


def _is_forward_step(code: CodeType) -> bool:
    name, file = FORWARD_STEP
    return code.co_name == name and code.co_filename.endswith(file)


def _is_training() -> bool:
    """False in evaluations, which run without gradients."""
    return sys.modules["torch"].is_grad_enabled()


def _file_of(code: CodeType) -> str | None:
    """Path inside `mkd/`; None for other packages and the CPU backend."""
    file = code.co_filename.removeprefix(PACKAGE)
    return None if file == code.co_filename or file.startswith(CPU_BACKEND) else file


def transitions(calls: Sequence[Call]) -> list[Call]:
    """Calls that leave the file of the call before."""
    return [call for before, call in itertools.pairwise(calls) if call.file != before.file]


def profile(folder: Path) -> list[Call]:
    """Calls of the microbatch of a job of one step, whose models and data are made in `folder`.

    Raises:
        RuntimeError: Megatron's schedule has no function of the expected name, or it calls nothing of mkd.
    """
    os.environ |= {"MKD_DEVICE": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    sys.path.insert(0, str(ROOT))
    from mkd import cpu

    cpu.activate()  # before anything imports megatron
    from tests.support.e2e import small_job

    small_job.STUDENT["num_hidden_layers"] = small_job.TEACHER["num_hidden_layers"] = 2
    job = small_job.make_small_job(folder)
    flags = job.flags(
        {
            "--train-iters": 1,
            "--micro-batch-size": 2,
            "--global-batch-size": 2,
            "--kd-loss-impl": "eager",
            "--kd-metrics-file": folder / "metrics.jsonl",
        }
    )
    os.environ["MASTER_PORT"] = str(small_job.free_port())
    sys.argv = ["pretrain_kd.py", *flags]
    from mkd.cli.train_job import run_job

    recorder = Recorder()
    sys.setprofile(recorder)
    try:
        run_job()
    finally:
        sys.setprofile(None)
    if not recorder.calls:
        raise RuntimeError(f"no call of mkd inside {FORWARD_STEP[0]} of {FORWARD_STEP[1]}; adapt FORWARD_STEP")
    return recorder.calls


def report(calls: Sequence[Call]) -> str:
    """Every stretch of calls within one file, in order; the files; the totals."""
    lines, entered = [], set()
    for file, stretch in itertools.groupby(calls, key=lambda call: call.file):
        functions = ", ".join(dict.fromkeys(call.function for call in stretch))
        lines.append(f"{'  ' if file in entered else '> '}{file}: {functions}")
        entered.add(file)
    changes = transitions(calls)
    called, reached = Counter(call.file for call in calls), Counter(call.file for call in [calls[0], *changes])
    lines.append(f"\n{'entered':>7} {'calls':>6}  file")
    lines += [f"{reached[file]:7d} {called[file]:6d}  {file}" for file in called]
    returns = len(changes) - (len(called) - 1)
    lines.append(f"\n{len(called)} files, {len(changes)} transitions, {returns} of them returns")
    return "\n".join(lines)


def main() -> None:
    """Print the profile; '>' marks the first entry of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = profile(Path(folder))
    print(report(calls))


if __name__ == "__main__":
    main()
