"""A long training of a tiny model: memory, open files, threads and the time of a step stay flat over restarts.

    bash tests/chaos/run.sh --soak --steps 2000 --out runs/soak

Evaluations, asynchronous saves, metrics and Hugging Face folders beside the checkpoints; the job is stopped and started
again three times. Writes soak.json and soak.png. Exit status 1 if a number grows.
"""

import json
import signal
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.fuzz import DOCUMENTS, WRITTEN, train
from tests.chaos.lab import Lab
from tests.chaos.sandbox import Job

RESTARTS = 3
WARM_UP = 100
"""Steps of each attempt that are left out: allocators and caches fill up."""
EVERY_S = 0.5
LIMITS = {"memory_mib": 0.03, "open_files": 0.05, "threads": 0.05, "step_s": 0.15}
"""Growth of the last quarter of the steps over the second one that is allowed, as a share: of the medians, and for the
time of a step of the fastest tenth, since other work on the machine slows steps down."""
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Sample:
    """One observation of the trainer; its writer processes are counted separately."""

    attempt: int
    iteration: int
    memory_mib: float
    open_files: int
    threads: int
    processes: int


def soak(lab: Lab, steps: int, *, plot: bool = True) -> dict[str, Any]:
    """Run the training; returns samples, the time of each step, and growth."""
    save = lab.fresh("soak") / "save"
    samples: list[Sample] = []
    stops = [steps * number // (RESTARTS + 1) for number in range(1, RESTARTS + 1)]
    for attempt in range(RESTARTS + 1):
        job = Job(_words(save, steps), save.with_name(f"streams{attempt}")).start()
        stop = stops[attempt] if attempt < RESTARTS else None
        _watch(job, save, attempt, stop, samples)
        ended = job.wait(LIMIT_S)
        assert ended.status == 0 and not ended.timed_out, ended.output[-2000:] + ended.errors[-3000:]
    times = [(line["iteration"], line["step_s"]) for line in _lines(save) if "step_s" in line]
    assert [iteration for iteration, _ in times] == list(range(1, steps + 1))
    growth = {
        name: _growth([(s.iteration, getattr(s, name)) for s in _warm(samples)], steps)
        for name in LIMITS
        if name != "step_s"
    }
    growth["step_s"] = _growth([t for t in times if t[0] > WARM_UP], steps, share=0.1)
    facts = {
        "steps": steps,
        "restarts": RESTARTS,
        "saves": steps // 50,
        "growth": growth,
        "medians": _medians(samples, times),
        "flat": all(growth[name] <= LIMITS[name] for name in LIMITS),
    }
    (lab.root / "soak.json").write_text(
        json.dumps(facts | {"samples": [asdict(s) for s in samples], "step_s": times}, indent=1) + "\n"
    )
    if plot:
        _plot(samples, times, lab.root / "soak.png")
    return facts


def _words(save: Path, steps: int) -> list[str]:
    flags = {
        **DOCUMENTS,
        "--kd-student-hf": WRITTEN / "student",
        "--kd-teacher-hf": WRITTEN / "teacher",
        "--data-path": WRITTEN / "corpus_text_document",
        "--data-cache-path": save.with_name("data_cache"),
        "--train-iters": steps,
        "--lr-decay-iters": steps,
        "--save": save,
        "--load": save,
        "--save-interval": 50,
        "--async-save": True,
        "--kd-save-hf-interval": 100,
        "--kd-save-hf-keep": 2,
        "--eval-interval": 100,
        "--eval-iters": 2,
        "--kd-metrics-file": None,
        "--num-workers": 1,
    }
    return train(flags=flags)


def _lines(save: Path) -> list[dict[str, Any]]:
    file = save / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _watch(job: Job, save: Path, attempt: int, stop: int | None, samples: list[Sample]) -> None:
    """Take samples until the job ends; send SIGTERM after the step `stop`. Old checkpoints are removed."""
    trainer, is_stopped = psutil.Process(job.pids[0]), False
    while not job.poll():
        time.sleep(EVERY_S)
        iteration = max((line["iteration"] for line in _lines_of_tail(save)), default=0)
        try:
            with trainer.oneshot():
                numbers = trainer.memory_info().rss / 2**20, trainer.num_fds(), trainer.num_threads()
            if numbers[0] < 1:  # the process has ended, and its parent has not noticed yet
                continue
            samples.append(Sample(attempt, iteration, *numbers, len(trainer.children(recursive=True))))
        except (psutil.Error, OSError):
            continue
        if stop is not None and iteration >= stop and not is_stopped:
            is_stopped = True
            job.signal(signal.SIGTERM, 0)
        _keep_newest(save)


def _lines_of_tail(save: Path) -> list[dict[str, Any]]:
    """The complete lines among the last 4 KiB of the metrics."""
    file = save / "metrics.jsonl"
    if not file.is_file():
        return []
    with file.open("rb") as content:
        content.seek(max(file.stat().st_size - 4096, 0))
        whole = content.read().split(b"\n")[:-1]
    return [json.loads(line) for line in whole if line.startswith(b"{")]


def _keep_newest(save: Path) -> None:
    """Remove all but the newest four checkpoints."""
    import shutil

    for folder in sorted(save.glob("iter_*"))[:-4]:
        shutil.rmtree(folder, ignore_errors=True)


def _warm(samples: list[Sample]) -> list[Sample]:
    first = {s.attempt: s.iteration for s in reversed(samples) if s.iteration > 0}
    return [s for s in samples if s.iteration > first.get(s.attempt, 0) + WARM_UP]


def _growth(values: list[tuple[int, float]], steps: int, share: float = 0.5) -> float:
    """A quantile of the last quarter of the steps over that of the second one, minus 1."""
    parts = [sorted(v for i, v in values if steps * a / 4 < i <= steps * b / 4) for a, b in ((1, 2), (3, 4))]
    before, after = (part[int(share * len(part))] for part in parts)
    return after / before - 1


def _medians(samples: list[Sample], times: list[tuple[int, float]]) -> list[dict[str, float]]:
    """Medians of each attempt after its first steps."""
    found = []
    for attempt in range(RESTARTS + 1):
        part = [s for s in _warm(samples) if s.attempt == attempt]
        first, last = part[0].iteration, part[-1].iteration
        row: dict[str, float] = {"from": first, "to": last}
        for name in ("memory_mib", "open_files", "threads"):
            row[name] = statistics.median(getattr(s, name) for s in part)
        row["memory_growth_mib"] = part[-1].memory_mib - part[0].memory_mib
        row["step_s"] = statistics.median(seconds for iteration, seconds in times if first <= iteration <= last)
        found.append(row)
    return found


def _plot(samples: list[Sample], times: list[tuple[int, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    titles = {"memory_mib": "memory of the trainer (MiB)", "open_files": "open files", "threads": "threads"}
    for axis, (name, title) in zip(axes.flat, titles.items(), strict=False):
        for attempt in range(RESTARTS + 1):
            part = [s for s in samples if s.attempt == attempt and s.iteration > 0]
            axis.plot([s.iteration for s in part], [getattr(s, name) for s in part], ".", markersize=2)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    axes.flat[3].plot([i for i, _ in times], [1000 * seconds for _, seconds in times], ".", markersize=1, color="gray")
    axes.flat[3].set_title("time of a step (ms)")
    axes.flat[3].set_ylim(0, 4000 * statistics.median(seconds for _, seconds in times))
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
