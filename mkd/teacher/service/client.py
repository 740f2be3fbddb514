"""The teacher that a service computes; of its weights, only the LM head is on the student's ranks."""

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.errors import MkdNumericError, MkdTeacherError
from mkd.teacher.run_ahead import AllRanks, PendingRequest, RunAhead
from mkd.teacher.service.answers import HiddenAnswers, Received, TargetAnswers
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.targets import Targets
from mkd.teacher.service.whole_rows import WholeRowTeacher


@dataclass(frozen=True)
class _Request:
    """A forward request and the size of its answer. See `mkd.teacher.run_ahead.BatchRequest`."""

    forward: ForwardRequest
    key: bytes
    answer_bytes: int


class ServedTeacher(WholeRowTeacher[_Request]):
    """Requests the hidden states, or the targets, of those tokens that the loss reads."""

    def __init__(
        self,
        connections: TeacherConnections | None,
        facts: TeacherFacts,
        answers: HiddenAnswers | TargetAnswers,
        ranks: AllRanks,
        ahead: RunAhead,
        *,
        view: int | None = None,
        targets: Targets | None = None,
    ) -> None:
        """No request is sent yet.

        Args:
            connections: on the ranks that send requests (`Groups.leads_replica`); other ranks may have some too.
            facts: the teacher.
            answers: from answers to signals.
            ranks: how ranks wait and fail together.
            ahead: options of running ahead.
            view: see `WholeRowTeacher`.
            targets: the service computes these; None for hidden states.
        """
        super().__init__(answers.groups.leads_replica, answers, ranks, ahead, view)
        self._connections, self._facts, self._targets = connections, facts, targets

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._facts.fingerprint

    def close(self) -> None:
        """Close the connections."""
        if self._connections is not None:
            self._connections.close()

    def _check_silence(self, began: float) -> None:
        self._connections.check_silence(began, self._ahead.timeout_s)

    def _request(self, batch: KDBatch) -> _Request:
        """The request for those tokens of a whole microbatch that the loss reads."""
        own, wanted = self._own_tokens(batch), batch.kd_mask != 0.0
        if self._view is not None:
            wanted = batch.teacher_views[self._view].chunk >= 0
        if self._targets is None:
            wanted = (own.ce_mask != 0.0) | wanted
        forward = ForwardRequest.of_batch(own, wanted, self._targets)
        answer_bytes = len(forward.wanted) * self._answers.bytes_per_token
        return _Request(forward, forward.key, self._connections.host_bytes(answer_bytes))

    def _send(self, request: _Request) -> list[Future[Tensor]]:
        values: dict[str, Any] = {"fingerprint": self._facts.fingerprint}
        if self._targets is not None:
            values["targets"] = self._targets.values()
        read = partial(self._read, len(request.forward.wanted))
        return [self._connections.submit(Message(Kind.FORWARD, 0, values, request.forward.tensors), read)]

    def _read(self, count: int, answer: Message) -> Tensor:
        """The tensor of an answer for `count` tokens, which is checked in the thread of the connections."""
        facts, answers = self._facts, self._answers
        if answer.kind != answers.kind or answer.values.get("fingerprint") != facts.fingerprint:
            raise MkdTeacherError(f"the teacher answers with {answer.kind.name} of {answer.values}: is it another one?")
        shapes = [(tuple(one.shape), one.dtype) for one in answer.tensors]
        if shapes != [((count, answers.columns), answers.dtype)]:
            raise MkdTeacherError(
                f"the teacher answers with {answers.name} of {shapes}; {count} tokens of width {answers.columns} in "
                f"{str(answers.dtype).removeprefix('torch.')} were requested: is it the same version of mkd?"
            )
        if not answers.is_finite(answer.tensors[0]):
            raise MkdNumericError(
                f"the {answers.name} of the teacher {facts.fingerprint} ({facts.description}) are not finite: its "
                "weights are damaged, or it overflows in its precision (--kd-teacher-dtype of mkd serve-teacher)"
            )
        if self._targets is not None and not self._targets.have_valid_ids(answer.tensors[0]):
            raise MkdTeacherError(
                f"the {answers.name} of the teacher {facts.fingerprint} ({facts.description}) have token ids outside "
                f"of the vocabulary of {self._targets.vocab} tokens, or in another order: is it the same version of "
                "mkd?"
            )
        return answer.tensors[0]

    def _receive(self, pending: PendingRequest[_Request]) -> Received:
        return pending.request.forward.wanted.long(), pending.answers[0].result()
