"""The common part of teachers that run elsewhere: requests are sent ahead of the step that needs the answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from mkd.data.batch import KDBatch
from mkd.teacher.run_ahead import AllRanks, BatchRequest, RequestQueue, RunAhead


class TeacherElsewhere[R: BatchRequest](ABC):
    """Requests are sent by one rank per model replica: the first tensor- and context-parallel rank of its last stage
    (`Groups.leads_replica`).

    `prepare` returns when all answers of the step have arrived: a failure is then raised on all ranks, before any of
    them has begun the step.
    """

    def __init__(self, sends: bool, ranks: AllRanks, ahead: RunAhead) -> None:
        """No request is sent yet.

        Args:
            sends: True on the ranks that send requests.
            ranks: how ranks wait and fail together.
            ahead: options of running ahead.
        """
        self._sends, self._ranks, self._ahead = sends, ranks, ahead
        self._queue = RequestQueue[R](ahead, self._request, self._send)
        self._whole: list[KDBatch] = []
        """The microbatches of the step, whole and on the host."""

    @abstractmethod
    def _request(self, batch: KDBatch) -> R:
        """The request for a whole microbatch on the host."""

    @abstractmethod
    def _send(self, request: R) -> Sequence[Future[Any]]:
        """Send a request; its answers to come."""

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return False

    @property
    def begins_early(self) -> bool:
        """See `Teacher.begins_early`."""
        return True

    def begin(self, batch: KDBatch) -> None:
        """See `Teacher.begin`."""
        if self._sends:
            self._queue.begin(batch)

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return {}
