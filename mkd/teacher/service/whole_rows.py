"""Teachers elsewhere whose answers one rank of a replica receives for whole rows; each rank gets its part of them."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.teacher.elsewhere import TeacherElsewhere
from mkd.teacher.interface import HiddenSignal, TopKSignal
from mkd.teacher.run_ahead import AllRanks, BatchRequest, PendingRequest, RunAhead
from mkd.teacher.service.answers import HiddenAnswers, Received, TargetAnswers, Uploads


class WholeRowTeacher[R: BatchRequest](TeacherElsewhere[R]):
    """Answers wait on the host of the rank that sends requests. Each is copied to the device, and distributed over the
    ranks of the last stage, when its signal is read."""

    def __init__(
        self, sends: bool, answers: HiddenAnswers | TargetAnswers, ranks: AllRanks, ahead: RunAhead, view: int | None
    ) -> None:
        """No request is sent yet.

        Args:
            sends, ranks, ahead: see `TeacherElsewhere`.
            answers: from answers to signals.
            view: index in `KDBatch.teacher_views` of the tokens that the teacher reads; None: the student's tokens.
        """
        super().__init__(sends, ranks, ahead)
        self._answers, self._view = answers, view
        self._step: list[PendingRequest[R]] = []
        self._uploads = Uploads()

    @abstractmethod
    def _check_silence(self, began: float) -> None:
        """Raise MkdTeacherTimeout if no answer has come for the time limit since `began`."""

    @abstractmethod
    def _receive(self, pending: PendingRequest[R]) -> Received:
        """The answer to a request, which has arrived."""

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`.

        Raises:
            MkdTeacherTimeout: on all ranks, if no answer has come for the time limit.
            MkdTeacherError, MkdNumericError: on all ranks, if an answer cannot be used.
            WaitAborted: on all ranks, if one of them is stopping and one of them has no answer yet.
        """
        self._whole = list(batches)
        step = self._queue.send(batches, upcoming) if self._sends else []
        self._ranks.wait(step, lambda _: None, self._check_silence, upcoming.is_stopping)
        self._step = step
        self._uploads.begin(len(step), lambda number: self._receive(self._step[number]))
        return self._whole

    def signals(self, batches: Sequence[KDBatch]) -> Iterable[HiddenSignal | TopKSignal]:
        """See `Teacher.signals`. `prepare` has had the same microbatches."""
        if not self._answers.groups.is_last_stage:
            return []
        signals = (self._signal(batch.number) for batch in batches)
        return signals if len(batches) > 1 else list(signals)

    def _signal(self, number: int) -> HiddenSignal | TopKSignal:
        """The signal of this rank's part of a microbatch."""
        received = self._uploads.take(number) if self._sends else None
        return self._answers.signal(self._own_tokens(self._whole[number]), received)

    def _own_tokens(self, batch: KDBatch) -> KDBatch:
        """A whole microbatch in the teacher's tokenizer."""
        return batch if self._view is None else batch.teacher_views[self._view].batch
