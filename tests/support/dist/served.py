"""Teacher services of the small models' teacher, and runs that they teach, for workers of the pool."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode
from torch import Tensor

from mkd.compat.stopping import WaitAborted
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.data.microbatches import next_microbatches
from mkd.distributed.groups import Groups
from mkd.errors import MkdError
from mkd.rollout import on_policy
from mkd.rollout.early import EarlyMicrobatches
from mkd.rollout.on_policy import OnPolicy
from mkd.teacher.inference.pool import ScoringPool
from mkd.teacher.inference.teacher import InferenceTeacher
from mkd.teacher.service.addresses import Address, ServiceAddress
from mkd.teacher.service.client import ServedTeacher
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.model import TeacherRanks
from mkd.teacher.service.server import TeacherServer
from mkd.teacher.service.socket_file import SocketFile
from tests.support.dist import kd_step
from tests.support.dist.kd_pairs import TEACHER_PADDED, TEACHER_VOCAB
from tests.support.dist.kd_run import STEPS, Run
from tests.support.dist.kd_samples import VOCAB, microbatches
from tests.support.dist.kd_step import Layout, Models, build_model_teacher, build_teacher, parallel_state
from tests.support.dist.pool import Pool, WorkerError


def facts_of(layout: Layout, models: Models, **changes: Any) -> TeacherFacts:
    """Facts of the small models' teacher, or with `Models.xtoken` of that with another tokenizer."""
    if models.xtoken is not None:
        changes |= dict(fingerprint="foreign", vocab=TEACHER_VOCAB)
    cp, sp = layout.cp, layout.tp if layout.sp else 1
    facts = dict(
        fingerprint=models.salt,
        description="small",
        tokenizer=None,
        vocab=VOCAB,
        positions=64,
        width=models.teacher["hidden_size"],
        logit_scale=1.0,
        dtype="float32",
        packed=True,
        most_tokens=1000,
        row_multiple=2 * cp * sp if cp > 1 else sp,
        segment_multiple=2 * cp if cp > 1 else 1,
    )
    return TeacherFacts(**(facts | changes))


class _Faulty(TeacherServer):
    """A service that answers wrongly, or no longer."""

    fault = ""
    answers_left: int | None = None
    """It receives `last_signal` after this number of answers; None for never."""
    last_signal = signal.SIGKILL

    def _send(self, client: bytes, message: Message) -> None:
        if message.kind == Kind.HIDDEN:
            if self.answers_left is not None:
                self.answers_left -= 1
            (hidden,) = message.tensors
            match self.fault:
                case "NaN":
                    hidden[-1, -1] = torch.nan
                case "truncated":
                    hidden = hidden[:-1]
                case "silent":
                    return
            message = replace(message, tensors=(hidden,))
        super()._send(client, message)
        if self.answers_left == 0:
            self.answers_left = None
            os.kill(os.getpid(), self.last_signal)


def serve(
    rank: int,
    world_size: int,
    layout: Layout,
    models: Models,
    folder: str,
    address: Address,
    fault: str,
    answers: int | None,
    last_signal: signal.Signals,
) -> tuple[int, int]:
    """Serve until the file `stop` is in `folder`; (requests, tokens) of the service.

    Args:
        rank, world_size: of the pool.
        layout: of the service.
        models: the teacher.
        folder: where the front rank writes the file `address`.
        address: where to listen.
        fault: what is wrong with answers, see `_Faulty`.
        answers, last_signal: see `_Faulty`.
    """
    stop = Path(folder) / "stop"
    with parallel_state(layout):
        groups = Groups.from_megatron()
        if models.xtoken is None:
            teacher = build_model_teacher(layout, models, groups, tied=False, salt=models.salt)
        else:
            teacher = build_model_teacher(layout, models, groups, tied=False, vocab=(TEACHER_VOCAB, TEACHER_PADDED))
        ranks = TeacherRanks(teacher, groups, sequence_parallel=layout.sp)
        facts = facts_of(layout, models)
        head = ranks.lm_head(facts.vocab)
        if not groups.leads_replica:
            ranks.follow()
            return 0, 0
        server = _Faulty(facts, address, None)
        server.fault, server.answers_left, server.last_signal = fault, answers, last_signal
        partial = Path(folder) / "partial"
        partial.write_text(server.address)
        partial.rename(Path(folder) / "address")
        server.serve(ranks, head, stop.exists)
        server.close()
        return server._work.requests, server._work.tokens


LIFETIME_S = 1200.0
"""A service that the tests of a module share lives as long as all of them."""


@dataclass
class Service:
    """A service in a pool of its own."""

    folder: Path
    layout: Layout = Layout()  # noqa: RUF009 (a named tuple)
    models: Models = Models()  # noqa: RUF009 (frozen)
    fault: str = ""
    answers: int | None = None
    """It receives `last_signal` after this number of answers; None for never."""
    last_signal: signal.Signals = signal.SIGKILL
    port: int = 0
    is_local: bool = False
    """It listens at a socket file."""
    _pool: Pool = field(init=False)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _result: Future[list[Any]] | None = None

    def __post_init__(self) -> None:
        self._pool = Pool(self.layout.tp * self.layout.pp * self.layout.cp)

    def start(self) -> str:
        """Start it, at the port of before if it has run; returns its address."""
        for name in ("address", "stop"):
            (self.folder / name).unlink(missing_ok=True)
        at = ServiceAddress("127.0.0.1", self.port)
        if self.is_local:
            at = SocketFile(self.folder / "own/socket", "--address")
        words = (self.layout, self.models, str(self.folder), at, self.fault, self.answers, self.last_signal)
        self._result = self._thread.submit(self._pool.run, serve, *words, timeout=LIFETIME_S)
        deadline = time.monotonic() + 60
        while not (self.folder / "address").exists():
            assert time.monotonic() < deadline and not self._result.done(), self._result
            time.sleep(0.02)
        address = (self.folder / "address").read_text()
        if not self.is_local:
            self.port = int(address.rpartition(":")[2])
        return address

    def stop(self) -> list[Any]:
        """Have it end by itself."""
        (self.folder / "stop").touch()
        return self._result.result(timeout=30)

    def join(self) -> None:
        """Wait until it is killed."""
        with pytest.raises(WorkerError):
            self._result.result(timeout=60)

    def is_paused(self) -> bool:
        """True after SIGSTOP."""
        status = Path(f"/proc/{self._pool._processes[0].pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self._pool._processes[0].pid, signal.SIGCONT)

    def close(self) -> None:
        """End its processes. The thread stops the pool of a service that is killed, and has ended before this one
        does."""
        for process in list(self._pool._processes):
            process.kill()
        self._thread.shutdown()
        self._pool.stop()


class _Recording:
    def get_mode(self) -> RerunMode:
        return RerunMode.VALIDATE_RESULTS


class _ServedRun(Run):
    """A run whose iterators have the samples of later steps too, as megatron's have."""

    def iterator(self, batches: list[dict[str, Tensor]], step: int, evaluating: bool) -> Iterator[Any]:
        layout, dp = self._layout, self._groups.dp
        for later in () if evaluating else range(step + 1, STEPS):
            words = (layout.segment_cp, layout.mbs, dp.rank(), dp.size(), self._models.masks, later)
            batches = [*batches, *microbatches(self._models.data, *words)]
        return RerunDataIterator(iter(batches))


def served_run(
    rank: int, world_size: int, layout: Layout, models: Models, steps: int, fault: None = None
) -> dict[str, Any]:
    """`kd_run` with a teacher behind `Models.served`."""
    machine = patch("megatron.core.rerun_state_machine.get_rerun_state_machine", _Recording)
    with parallel_state(layout), machine:
        run = _ServedRun(layout, models)
        try:
            return run.result(steps)
        finally:
            for teacher in getattr(run._teacher, "teachers", [run._teacher]):
                teacher.close()


def impatient_run(*args: Any) -> dict[str, Any]:
    """`served_run` in which a service that is silent for 0.5 s is lost."""
    with patch.multiple("mkd.teacher.service.addresses", _HEARTBEAT_MS=100, _LOST_AFTER_MS=500):
        return served_run(*args)


def served_on_policy(
    rank: int, world_size: int, layout: Layout, models: Models, policy: OnPolicy, early: bool = True
) -> dict[str, Any]:
    """`kd_step` with written rows and a teacher behind `Models.served`.

    Args:
        rank, world_size: of the pool.
        layout, models, policy: what runs.
        early: False to send all requests after the last text is written.

    Returns:
        the result of the step, and `events`: "sent" for each request of this rank, "text" where one of its own
        texts ends that its replica writes, and "written" after the last text of all.
    """
    events: list[str] = []
    teachers: list[Any] = []

    def logged(call: Callable[..., Any], event: str, counts: Callable[..., bool] = lambda *_: True) -> Any:
        def log(*args: Any) -> Any:
            if event != "written" and counts(*args):
                events.append(event)
            found = call(*args)
            if event == "written":
                events.append(event)
            return found

        return log

    def build(*args: Any) -> Any:
        teachers.append(build_teacher(*args))
        return teachers[-1]

    submit = logged(TeacherConnections.submit, "sent", lambda _, message, *__: message.kind == Kind.FORWARD)
    done = logged(EarlyMicrobatches.done, "text", lambda self, index, tokens: index in self._own)
    with ExitStack() as around:
        around.enter_context(patch.object(kd_step, "build_teacher", build))
        around.enter_context(patch.object(on_policy, "write_texts", logged(on_policy.write_texts, "written")))
        around.enter_context(patch.object(EarlyMicrobatches, "done", done))
        around.enter_context(patch.object(TeacherConnections, "submit", submit))
        around.enter_context(patch.object(ScoringPool, "submit", logged(ScoringPool.submit, "sent")))
        for kind in () if early else (ServedTeacher, InferenceTeacher):
            around.enter_context(patch.object(kind, "begins_early", False))
        try:
            return kd_step.kd_step(rank, world_size, layout, models, policy) | {"events": events}
        finally:
            for teacher in teachers:
                teacher.close()


def assert_same_steps(seen: list[dict[str, Any]], truth: list[dict[str, Any]]) -> None:
    """Reports and gradients of all ranks are equal to the last bit."""
    for one, other in zip(seen, truth, strict=True):
        assert one["reports"].keys() == other["reports"].keys()
        assert all(torch.equal(one["reports"][key], value) for key, value in other["reports"].items())
        for (*place, value), (*expected_place, expected) in zip(one["gradients"], other["gradients"], strict=True):
            assert place == expected_place and torch.equal(value, expected)


def served_error(rank: int, world_size: int, layout: Layout, models: Models, stopping_rank: int | None = None) -> str:
    """The error that this rank raises in a step, with the name of its class.

    Args:
        rank, world_size: of the pool.
        layout, models: what runs.
        stopping_rank: a rank that has received a signal.
    """
    with parallel_state(layout):
        groups = Groups.from_megatron()
        collated = microbatches(models.data, layout.segment_cp, layout.mbs, groups.dp.rank(), groups.dp.size())
        batches: list[KDBatch] = next_microbatches(iter(collated), len(collated), VOCAB)
        teacher = build_teacher(layout, models, groups)
        try:
            teacher.prepare(batches, replace(Lookahead.empty(), is_stopping=lambda: rank == stopping_rank))
        except (MkdError, WaitAborted) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            teacher.close()
        return "none"
