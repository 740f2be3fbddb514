"""Measure a teacher service and its student on GPUs of their own, beside both models on all of these GPUs.

    python benchmarks/bench_service.py --teacher-gpus 1 --student-gpus 1 --json service.json
    python benchmarks/bench_service.py --small

Models with random weights are made on the spot (30 s for 8B and 1B). The jobs are those of `mkd launch`: one service
per GPU of the teacher, at socket files. Three measurements are the same for all of a teacher's work:

    at hand         the student's step when the teacher's outputs are there already. Hidden states: a training with a
                    teacher of the same width and one layer on the student's GPUs, without the time of that teacher;
                    top-k targets: a training from a cache
    teacher alone   the service, with a client that sends requests as fast as they are answered
    sharing         a training with both models on all GPUs

"of the slower" is the rate of the training relative to that of the slower of the first two, which is the limit of a
perfect overlap. A teacher of one layer is faster than every student: its row shows what the service costs the student.
A job that fails is listed with the reason and does not stop the others.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu

if not mkd.cpu.is_active():
    # This process only starts jobs and sends requests, and must not allocate memory on the cards.
    mkd.cpu.activate(stands_in=not mkd.cpu.wanted())

import torch
from bench_common import Row, commit_of_checkout, installed_versions, markdown, number

from benchmarks.inputs import llama, make_random, write_tokens
from benchmarks.trainings import (
    B1,
    B8,
    OVERLAP,
    add_training_options,
    card_name,
    check_training_options,
    last_error,
    lines_of_steps,
    short_reason,
    training_flags,
    write_rows,
)
from mkd.cli.launch import flags_of, jobs
from mkd.cli.node_jobs import NodeJob, free_ports
from mkd.compat.startup import use_prebuilt_dataset_helpers
from mkd.errors import MkdError
from mkd.teacher.service.addresses import parse_address
from mkd.teacher.service.connections import TeacherConnections, request_facts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.targets import TopKTargets

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 6
"""Steps at the beginning that are not counted. While the student compiles in the first, the service computes ahead."""
ALONE_STEPS = 3
"""Steps of requests of a client that measures the service alone."""
MOST_ANSWER_BYTES = 1 << 31


@dataclass(frozen=True)
class Teacher:
    """A teacher and the row of the table about it."""

    name: str
    config: dict[str, Any]
    fp8: bool = False
    top_k: int | None = None
    """The service sends top-k targets; None for hidden states."""
    shares: bool = True
    """True if it is also measured with both models on all GPUs."""

    @property
    def flags(self) -> list[str]:
        return ["--kd-teacher-dtype", "fp8"] if self.fp8 else []

    @property
    def student_flags(self) -> list[str]:
        return [] if self.top_k is None else ["--kd-top-k", str(self.top_k), "--kd-teacher-targets", "top_k"]

    @property
    def folder(self) -> str:
        """Name of its folder; equal for equal models."""
        return f"teacher-{self.config['num_hidden_layers']}"


@dataclass(frozen=True)
class Sizes:
    """The models and the work of a step."""

    teachers: Sequence[Teacher]
    student: dict[str, Any]
    rows: int
    """Rows per step."""
    micro_batch: int
    seq_length: int

    @property
    def one_layer(self) -> Teacher:
        """The first teacher with one layer."""
        return Teacher("one layer", self.teachers[0].config | {"num_hidden_layers": 1})


SMALL_TEACHER = llama(4, 64, 96, 8, 4, 512, False)
FULL = Sizes(
    [
        Teacher("8B, bf16", B8),
        Teacher("8B, FP8", B8, fp8=True),
        Teacher("one layer of 8B's width", B8 | {"num_hidden_layers": 1}, shares=False),
        Teacher("the same, top-k 64", B8 | {"num_hidden_layers": 1}, top_k=64, shares=False),
    ],
    B1,
    rows=16,
    micro_batch=2,
    seq_length=4096,
)
SMALL = Sizes(
    [
        Teacher("4 layers", SMALL_TEACHER),
        Teacher("one layer, top-k 8", SMALL_TEACHER | {"num_hidden_layers": 1}, top_k=8, shares=False),
    ],
    llama(4, 32, 64, 4, 4, 512, True),
    rows=4,
    micro_batch=1,
    seq_length=64,
)


def flags_of_training(sizes: Sizes, folder: Path, steps: int, ranks: int) -> list[str]:
    """Flags of the student and its data, without those of a teacher."""
    own = ("--kd-student-hf", str(folder / "student"), "--kd-ratio", "0.5")
    common = training_flags(folder, folder / "text", steps, sizes.rows, sizes.micro_batch, sizes.seq_length)
    metrics = ("--kd-metrics-file", str(folder / "metrics.jsonl"))
    return [*own, *common, *metrics, *(OVERLAP if ranks > 1 else ())]


def prepare(sizes: Sizes, folder: Path, steps: int) -> None:
    """Make the models and the data that are not there yet."""
    teachers = {teacher.folder: teacher.config for teacher in (sizes.one_layer, *sizes.teachers)}
    for name, config in ({"student": sizes.student} | teachers).items():
        if not (folder / name).exists():
            log(f"makes {name}")
            make_random(folder / name, config)
    if not (folder / "text.idx").exists():
        write_tokens(folder / "text", max(64, sizes.rows * (steps + 4)), sizes.seq_length, 512)


class RunningJob:
    """The processes of a job; their output goes to a file."""

    def __init__(self, job: NodeJob, output: Path) -> None:
        self.output = output
        common = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4)), **os.environ}
        common |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        words = [sys.executable, "-m", "mkd", *job.words]
        with output.open("w") as file:
            options: dict[str, Any] = dict(stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
            environments = job.environments(common, free_ports(1)[0])
            self._ranks = [subprocess.Popen(words, env=env, **options) for env in environments]

    @property
    def is_running(self) -> bool:
        """True until a rank has failed or all have ended."""
        statuses = [rank.poll() for rank in self._ranks]
        return None in statuses and not any(statuses)

    def require_success(self) -> None:
        """Raise RuntimeError with the last error of a job that has failed."""
        if any(rank.returncode for rank in self._ranks):
            raise RuntimeError(last_error(self.output.read_text(errors="replace")))

    def terminate(self) -> None:
        """Send SIGTERM to the ranks."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Terminate the ranks, and kill those that are still running after 20 s each."""
        self.terminate()
        for rank in self._ranks:
            try:
                rank.wait(20.0)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


@contextmanager
def running(job: NodeJob, output: Path) -> Iterator[RunningJob]:
    """A job that ends with this context."""
    started = RunningJob(job, output)
    try:
        yield started
    finally:
        started.end()


def wait_for(job: NodeJob, output: Path, limit_s: float) -> None:
    """Run a job to its end.

    Raises:
        RuntimeError: it failed; the message has the last error that it printed.
        subprocess.TimeoutExpired: it took too long.
    """
    began = time.monotonic()
    with running(job, output) as started:
        while started.is_running:
            if time.monotonic() - began > limit_s:
                raise subprocess.TimeoutExpired(f"mkd {job.words[0]}", limit_s)
            time.sleep(0.1)
        started.require_success()


def train(job: NodeJob, folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run a training; its metrics, one line per counted step. Errors: see `wait_for`."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    wait_for(job, folder / "training.log", limit_s)
    return lines_of_steps(metrics)[WARMUP:]


def at_hand(lines: Sequence[dict[str, Any]]) -> float:
    """Seconds of a student's step with hidden states at hand, from a training with a small teacher on its ranks."""
    return median(line["step_s"] - line["teacher_s"] for line in lines)


def figures_of_served(lines: Sequence[dict[str, Any]]) -> Row:
    """Seconds per step of a served training, and the share of them in which it waits for answers."""
    seconds = [line["step_s"] for line in lines]
    return {
        "step_s": median(seconds),
        "waited": sum(line["cache_s"] for line in lines) / sum(seconds),
        "tokens_per_s": sum(line["tokens"] for line in lines) / sum(seconds),
    }


class Client:
    """Sends the requests of a student to services as fast as they are answered."""

    def __init__(self, urls: Sequence[str], limit_s: float, is_alive: Callable[[], bool], top_k: int | None) -> None:
        """Wait for the services.

        Args:
            urls: their addresses.
            limit_s: longest wait.
            is_alive: False if a service has ended.
            top_k: see `Teacher`.

        Raises:
            MkdError, RuntimeError: they do not answer.
        """
        addresses = [parse_address("address", url) for url in urls]
        deadline = time.monotonic() + limit_s
        while True:
            try:
                (facts, *_) = request_facts(addresses, None, 5.0, "address")
                break
            except MkdError:
                if not is_alive() or time.monotonic() > deadline:
                    raise
        self._targets = None if top_k is None else TopKTargets(top_k, facts.vocab, 1.0)
        self._values = {"fingerprint": facts.fingerprint}
        if self._targets is not None:
            self._values["targets"] = self._targets.values()
        self._connections = TeacherConnections(addresses, None, facts, MOST_ANSWER_BYTES)
        self._vocab = facts.vocab

    def seconds(self, sizes: Sizes) -> float:
        """Seconds of the service for the requests of one step."""
        per_step = sizes.rows // sizes.micro_batch
        self._run(sizes, per_step)
        began = time.perf_counter()
        self._run(sizes, ALONE_STEPS * per_step)
        return (time.perf_counter() - began) / ALONE_STEPS

    def close(self) -> None:
        self._connections.close()

    def _run(self, sizes: Sizes, count: int) -> None:
        shape = (sizes.micro_batch, sizes.seq_length)
        generator = torch.Generator().manual_seed(0)
        waiting: deque[Any] = deque()
        for _ in range(count):
            tokens = torch.randint(0, self._vocab, shape, generator=generator, dtype=torch.int32)
            positions = torch.arange(sizes.seq_length, dtype=torch.int32).expand(shape).contiguous()
            wanted = torch.arange(tokens.numel(), dtype=torch.int32)
            none, labels = torch.empty(0, dtype=torch.int32), None if self._targets is None else tokens.flatten()
            request = ForwardRequest(tokens, positions, none, wanted, labels, targets=self._targets)
            waiting.append(self._connections.submit(Message(Kind.FORWARD, 0, self._values, request.tensors)))
            if len(waiting) > 16:
                waiting.popleft().result(timeout=120.0)
        while waiting:
            waiting.popleft().result(timeout=120.0)


@dataclass(frozen=True)
class Places:
    """GPUs of the jobs, by number; None on CPU, where they are ranks."""

    teacher_gpus: int
    student_gpus: int

    @property
    def total(self) -> int:
        return self.teacher_gpus + self.student_gpus

    def devices(self, count: int) -> tuple[str, ...] | None:
        """The first GPUs of this node."""
        return None if mkd.cpu.wanted() else tuple(str(number) for number in range(count))

    def split(
        self, teacher: Teacher, flags: Sequence[str], folder: Path, sockets: Path
    ) -> tuple[list[NodeJob], NodeJob]:
        """The services of a teacher and their student, as `mkd launch` starts them."""
        own = Namespace(teacher_gpus=self.teacher_gpus, student_gpus=self.student_gpus, teacher_flags="")
        words = ["--kd-teacher-hf", str(folder / teacher.folder), *teacher.flags, *teacher.student_flags, *flags]
        return jobs(own, flags_of(words), self.devices(self.total), sockets)

    def job(self, ranks: int, *words: str) -> NodeJob:
        """A job on the first GPUs."""
        return NodeJob("job", words, ranks, self.devices(ranks))


class Benchmark:
    """All measurements; the rows are written to a file after each."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self.folder = args, folder.resolve()
        self.sizes: Sizes = SMALL if args.small else FULL
        self._places = Places(args.teacher_gpus, args.student_gpus)
        self.teachers = [one for one in self.sizes.teachers if not args.rows_of or one.name in args.rows_of]
        self.rows: list[Row] = [{"teacher": one.name} for one in self.teachers]
        self.head = {
            "commit": args.commit or commit_of_checkout(),
            "versions": installed_versions(),
            "gpus": [args.teacher_gpus, args.student_gpus],
            "rows_per_step": self.sizes.rows,
            "seq_length": self.sizes.seq_length,
        }

    def run_services(self) -> None:
        """Measure services. All of them start at once: one that has no request needs no time of its GPU."""
        services: list[list[RunningJob]] = []
        students: list[NodeJob] = []
        try:
            for number, teacher in enumerate(self.teachers):
                sockets = self.folder / f"sockets-{number}"
                sockets.mkdir(mode=0o700, exist_ok=True)
                found, student = self._places.split(teacher, self._flags(self._args.student_gpus), self.folder, sockets)
                students.append(student)
                outputs = [self.folder / f"service-{number}-{count}.log" for count, _ in enumerate(found)]
                services.append([RunningJob(job, output) for job, output in zip(found, outputs, strict=True)])
            for top_k in dict.fromkeys(teacher.top_k for teacher in self.teachers):
                rows = [row for row, one in zip(self.rows, self.teachers, strict=True) if one.top_k == top_k]
                self._attempt("at hand", rows, lambda k=top_k: self._measure_at_hand(k))
            for teacher, row, started, student in zip(self.teachers, self.rows, services, students, strict=True):
                measure = partial(self._measure_served, teacher, started, student)
                self._attempt(teacher.name, [row], measure)
                for one in started:
                    one.end()
        finally:
            left = [job for jobs_of_one in services for job in jobs_of_one]
            for one in left:
                one.terminate()
            for one in left:
                one.end()

    def run_sharing(self) -> None:
        """Measure both models on all GPUs."""
        for teacher, row in zip(self.teachers, self.rows, strict=True):
            if teacher.shares:
                measure = partial(self._measure_sharing, teacher)
                self._attempt(f"sharing, {teacher.name}", [row], measure, "sharing_failed")

    def _flags(self, ranks: int) -> list[str]:
        return flags_of_training(self.sizes, self.folder, self._args.steps, ranks)

    def _measure_at_hand(self, top_k: int | None) -> Row:
        ranks, limit_s = self._args.student_gpus, self._args.limit
        flags, teacher = self._flags(ranks), ("--kd-teacher-hf", str(self.folder / self.sizes.one_layer.folder))
        if top_k is None:
            return {"at_hand_s": at_hand(self._train(self._places.job(ranks, "train", *teacher, *flags)))}
        cache = str(self.folder / f"cache-{top_k}")
        if not Path(cache).exists():
            words = ("cache", "write", "--out", cache, "--top-k", str(top_k), "--", *teacher, *flags)
            wait_for(self._places.job(ranks, *words), self.folder / "cache.log", limit_s)
        job = self._places.job(ranks, "train", "--kd-teacher-cache", cache, *flags)
        return {"at_hand_s": median(line["step_s"] for line in self._train(job))}

    def _train(self, job: NodeJob) -> list[dict[str, Any]]:
        return train(job, self.folder, self._args.limit)

    def _measure_served(self, teacher: Teacher, services: Sequence[RunningJob], student: NodeJob) -> Row:
        urls = student.words[student.words.index("--kd-teacher-url") + 1 :][: len(services)]
        alive = lambda: all(one.is_running for one in services)  # noqa: E731
        try:
            client = Client(urls, self._args.limit, alive, teacher.top_k)
        except MkdError:
            for one in services:
                one.require_success()
            raise
        try:
            figures: Row = {"alone_s": client.seconds(self.sizes)}
        finally:
            client.close()
        log(f"  teacher alone: {figures['alone_s']:.3f} s")
        return figures | figures_of_served(self._train(student))

    def _measure_sharing(self, teacher: Teacher) -> Row:
        ranks = self._places.total
        words = ("train", "--kd-teacher-hf", str(self.folder / teacher.folder), *teacher.flags, *self._flags(ranks))
        lines = self._train(self._places.job(ranks, *words))
        figures = {name: median(line[f"{name}_s"] for line in lines) for name in ("step", "teacher")}
        return {"sharing_s": figures["step"], "sharing_teacher_s": figures["teacher"]}

    def _attempt(self, name: str, rows: Sequence[Row], work: Callable[[], Row], key: str = "failed") -> None:
        """Add figures to rows, or the reason of a failure under `key`."""
        log(name)
        try:
            figures = work()
        except (RuntimeError, OSError, MkdError, subprocess.TimeoutExpired, TimeoutError) as error:
            figures = {key: short_reason(error)}
        log(f"  {figures}")
        for row in rows:
            row |= figures
            add_ratios(row)
        write_rows(self._args.json, self.head, self.rows)


def add_ratios(row: Row) -> None:
    """Add `of_at_hand` and `of_slower` to a row with their figures."""
    if {"step_s", "at_hand_s", "alone_s"} <= row.keys():
        row["of_at_hand"] = row["step_s"] / row["at_hand_s"]
        row["of_slower"] = max(row["at_hand_s"], row["alone_s"]) / row["step_s"]


COLUMNS = [
    ("teacher", lambda row: row["teacher"]),
    ("s per step", lambda row: number(row, "step_s", ".3f")),
    ("waits", lambda row: number(row, "waited", ".1%")),
    ("tokens/s", lambda row: number(row, "tokens_per_s", ",.0f")),
    ("student, at hand", lambda row: number(row, "at_hand_s", ".3f")),
    ("step / at hand", lambda row: number(row, "of_at_hand", ".3f")),
    ("teacher alone", lambda row: number(row, "alone_s", ".3f")),
    ("of the slower", lambda row: number(row, "of_slower", ".3f")),
    ("sharing all GPUs", lambda row: number(row, "sharing_s", ".3f")),
    ("its teacher", lambda row: number(row, "sharing_teacher_s", ".3f")),
]


def log(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] bench_service: {text}", file=sys.stderr, flush=True)


_BEGAN = time.monotonic()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("teacher", "student"):
        parser.add_argument(f"--{name}-gpus", type=int, default=1, metavar="N", help=f"GPUs of the {name} (default: 1)")
    add_training_options(parser, steps=12, warmup=WARMUP)
    parser.add_argument(
        "--parts", choices=("services", "sharing", "both"), default="both", help="what to measure (default: both)"
    )
    args = parser.parse_args(argv)
    known = [one.name for one in (SMALL if args.small else FULL).teachers]
    check_training_options(parser, args, WARMUP, "teachers", known)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    args = parse(argv)
    use_prebuilt_dataset_helpers()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # jobs end, and what is measured is printed
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(args, folder)
        prepare(benchmark.sizes, benchmark.folder, args.steps)
        try:
            if args.parts != "sharing":
                benchmark.run_services()
            if args.parts != "services":
                benchmark.run_sharing()
        finally:
            card = "CPU" if mkd.cpu.wanted() else f"{args.teacher_gpus} + {args.student_gpus} x {card_name()}"
            head, table = f"{card}, commit {benchmark.head['commit']}", markdown(COLUMNS, benchmark.rows)
            print(f"{head}\n\n{table}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
