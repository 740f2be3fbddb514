"""Has inference servers write the texts of a rollout, on all ranks together."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mkd.checkpoint.live_export import LiveExport, LiveModel
from mkd.distributed.groups import Groups
from mkd.rollout.interface import Decoding, Request
from mkd.rollout.own_scores import own_scores
from mkd.rollout.served.server import StudentServer, StudentWeights
from mkd.rollout.served.sharing import SharedTexts, Sharer
from mkd.rollout.served.text_files import TextFiles, rollout_key
from mkd.rollout.served.weights import WeightFolders, on_first_rank
from mkd.teacher.inference.http import ROLLOUT
from mkd.teacher.run_ahead import AllRanks, PendingRequest
from mkd.utils.logging import logger

TIMEOUT_FLAG = "--kd-rollout-timeout"


@dataclass(frozen=True)
class _Texts:
    """The texts of a rollout, as a request of `AllRanks.wait`."""

    key: bytes = b""
    answer_bytes: int = 0


@dataclass(frozen=True)
class _Step:
    """The texts of a step, which Megatron's rerun machine may run again."""

    iteration: int
    requests: Sequence[Request]
    texts: list[list[int]]
    weights_at: int


@dataclass
class ServedWriter:
    """Writes texts in the place of the student's ranks. See `mkd.rollout.interface.TextWriter`.

    The first rank alone loads weights and sends texts, so that no server loads weights while it writes.
    """

    servers: Sequence[StudentServer]
    """On the first rank, else empty."""
    folders: WeightFolders
    model: LiveModel
    text: tuple[int, ...]
    """Token ids by which the weights of a server are compared with the student's."""
    refresh: int
    """Steps after which the weights are written again, at the next rollout."""
    timeout_s: float
    """Seconds without an answer after which the job saves and ends."""
    files: TextFiles | None = None
    """Keeps the texts for a job that is killed before the next checkpoint; None without checkpoints."""
    _ranks: AllRanks | None = None
    _weights: StudentWeights | None = field(default=None, init=False)
    _step: _Step | None = field(default=None, init=False)
    """The latest step, with its texts."""
    _is_resuming: bool = field(default=True, init=False)
    """True until texts are written that no earlier job has written."""

    def write(
        self,
        chunks: Sequence[nn.Module],
        groups: Groups,
        requests: Sequence[Request],
        options: Decoding,
        iteration: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> tuple[list[list[int]], int]:
        """See `TextWriter`.

        Raises:
            MkdTeacherTimeout: on all ranks, if no server has answered for the time limit.
            MkdTeacherError, MkdNumericError: on all ranks, if a server cannot be used.
            MkdCheckpointError: on all ranks, if the weights cannot be written, or another job writes there too.
            WaitAborted: on all ranks, if one of them is stopping and texts are not written yet.
        """
        if self._step is not None and (self._step.iteration, self._step.requests) == (iteration, requests):
            return self._step.texts, self._step.weights_at  # Megatron runs the step again: servers would write others
        self._ranks = self._ranks or AllRanks(self.timeout_s)
        self.folders.claim()
        text = self.text[: options.longest]
        scores = own_scores(chunks, groups, text, options)
        key = rollout_key(iteration, requests, options, scores)
        if self._is_resuming and (known := self._read_again(iteration, key, len(requests), options)) is not None:
            self._step = _Step(iteration, requests, *known)
            return known
        is_due = self._weights is None or iteration - self._weights.iteration >= self.refresh
        if is_due:
            self._weights = StudentWeights(self._write_weights(chunks, iteration), iteration, text, scores)
        rollout = SharedTexts(self._sharers(options), requests) if self.servers else None
        try:
            answers = [] if rollout is None else rollout.answers
            self._wait(answers, rollout, is_stopping)
            found = [answer.result() for answer in answers]
        finally:
            if rollout is not None:
                rollout.close()
        if is_due:
            self.folders.remove_others(self._weights.folder)
        texts = _broadcast(found, len(requests), options, self._ranks)
        if self.files is not None:
            on_first_rank(self.files.folder, lambda: self.files.write(iteration, key, texts, self._weights.iteration))
        self._step = _Step(iteration, requests, texts, self._weights.iteration)
        return texts, self._weights.iteration

    def _read_again(
        self, iteration: int, key: str, count: int, options: Decoding
    ) -> tuple[list[list[int]], int] | None:
        """The texts that an ended job had written with the same weights; None if there are none."""
        known = None
        if self.files is not None and dist.get_rank() == 0:
            known = self.files.read(iteration, key, count, options)
        weights_at = torch.tensor([-1 if known is None else known[1]])
        dist.broadcast(weights_at, src=0, group=self._ranks.group)
        self._is_resuming = weights_at.item() >= 0
        if not self._is_resuming:
            return None
        if known is not None:
            logger.info(f"the texts of iteration {iteration + 1} are those that {ROLLOUT.url} has written before")
        return _broadcast([] if known is None else known[0], count, options, self._ranks), weights_at.item()

    def _write_weights(self, chunks: Sequence[nn.Module], iteration: int) -> Path:
        began, export = time.monotonic(), LiveExport(self.model, chunks)
        with torch.no_grad():
            folder = self.folders.add(iteration, export.write)
        logger.info(f"wrote {folder} for {ROLLOUT.url} in {time.monotonic() - began:.1f} s")
        return folder

    def _sharers(self, options: Decoding) -> list[Sharer]:
        return [
            Sharer(
                str(one.server),
                prepare=partial(one.prepare, self._weights),
                write=partial(one.write, options=options),
                verify=one.verify,
                turn=one.turn,
            )
            for one in self.servers
        ]

    def _wait(
        self, answers: Sequence[Future[Any]], rollout: SharedTexts | None, is_stopping: Callable[[], bool]
    ) -> None:
        def check(pending: PendingRequest[_Texts]) -> None:
            for answer in pending.answers:
                answer.result()

        def check_silence(began: float) -> None:
            rollout.check_silence(began, (ROLLOUT.url, TIMEOUT_FLAG), self.timeout_s)

        pending = [] if rollout is None else [PendingRequest(_Texts(), answers)]
        self._ranks.wait(pending, check, check_silence, is_stopping)


def _broadcast(found: Sequence[Sequence[int]], count: int, options: Decoding, ranks: AllRanks) -> list[list[int]]:
    """The texts of the first rank, on all ranks."""
    table = torch.full((count, options.tokens + 1), -1, dtype=torch.int32)
    for row, tokens in zip(table, found, strict=False):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    dist.broadcast(table, src=0, group=ranks.group)
    rows = table.tolist()
    return [row[: row.index(-1)] for row in rows]
