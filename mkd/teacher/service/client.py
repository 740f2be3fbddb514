"""The teacher that a service computes; no model weights but the LM head are on the student's ranks."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.errors import MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.losses import LogitMap
from mkd.teacher.elsewhere import TeacherElsewhere
from mkd.teacher.interface import HiddenSignal, TopKSignal
from mkd.teacher.run_ahead import ROUND_S, AllRanks, PendingRequest, RunAhead
from mkd.teacher.service.answers import HiddenAnswers, Received, TargetAnswers, Uploads
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.server import MOST_ANSWER_BYTES
from mkd.teacher.service.targets import Targets


@dataclass(frozen=True)
class _Request:
    """A forward request and the size of its answer. See `mkd.teacher.run_ahead.BatchRequest`."""

    forward: ForwardRequest
    key: bytes
    answer_bytes: int


class ServedTeacher(TeacherElsewhere[_Request]):
    """The rank that sends requests receives the answers of whole rows once and distributes them, see
    `mkd.teacher.service.answers`.
    """

    def __init__(
        self,
        connections: TeacherConnections | None,
        facts: TeacherFacts,
        groups: Groups,
        ahead: RunAhead,
        *,
        head_columns: Tensor,
        sequence_parallel: bool,
        view: int | None = None,
        targets: Targets | None = None,
    ) -> None:
        """Fetch the LM head, if hidden states are requested. Collective over all ranks.

        Args:
            connections: see `needs_connections`.
            facts: the teacher.
            groups: the student's layout.
            ahead: options of running ahead.
            head_columns: [columns] int64 ids whose rows of the LM head are `HiddenSignal.head` on this tensor-parallel
                rank, in this order; rows of ids beyond the teacher's vocabulary are 0.
            sequence_parallel: True if the student's tensor-parallel ranks hold slices of the sequence.
            view: index in `KDBatch.teacher_views` of the tokens that the teacher reads; None: the student's tokens.
            targets: the service computes these; None for hidden states.
        """
        super().__init__(groups.leads_replica, AllRanks(ahead.timeout_s), ahead)
        self._connections, self._facts, self._groups = connections, facts, groups
        self._view, self._targets = view, targets
        self._step: list[PendingRequest[_Request]] = []
        self._uploads = Uploads()
        self._answers: HiddenAnswers | TargetAnswers
        if targets is None:
            head, logit_map = self._fetch_head(head_columns), LogitMap(facts.logit_scale, facts.logit_softcap)
            self._answers = HiddenAnswers(
                facts.width,
                facts.torch_dtype,
                logit_map,
                groups,
                head,
                sequence_parallel=sequence_parallel,
                view=view,
            )
        else:
            self._answers = TargetAnswers(facts, groups, targets)

    @staticmethod
    def needs_connections(groups: Groups) -> bool:
        """True on ranks that send requests: for microbatches, or for rows of the LM head."""
        return groups.leads_replica or (groups.is_last_stage and groups.dp_cp.rank() == 0)

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._facts.fingerprint

    def close(self) -> None:
        """Close the connections."""
        if self._connections is not None:
            self._connections.close()

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
        self._uploads.begin(len(step), self._received)
        return self._whole

    def _request(self, batch: KDBatch) -> _Request:
        """The request for those tokens of a whole microbatch that the loss reads."""
        own, wanted = self._tokens_of(batch), batch.kd_mask != 0.0
        if self._view is not None:
            wanted = batch.teacher_views[self._view].chunk >= 0
        if self._targets is None:
            wanted = (own.ce_mask != 0.0) | wanted
        forward = ForwardRequest.of_batch(own, wanted, self._targets)
        answer_bytes = len(forward.wanted) * self._answers.bytes_per_token
        return _Request(forward, forward.key, self._connections.host_bytes(answer_bytes))

    def _tokens_of(self, batch: KDBatch) -> KDBatch:
        """A whole microbatch in the teacher's tokenizer."""
        return batch if self._view is None else batch.teacher_views[self._view].batch

    def _send(self, request: _Request) -> list[Future[Tensor]]:
        values: dict[str, Any] = {"fingerprint": self._facts.fingerprint}
        if self._targets is not None:
            values["targets"] = self._targets.values()
        read = partial(self._read, len(request.forward.wanted))
        return [self._connections.submit(Message(Kind.FORWARD, 0, values, request.forward.tensors), read)]

    def _await(self, answer: Future[Message]) -> Message:
        began = time.monotonic()
        while True:
            try:
                return answer.result(timeout=ROUND_S)
            except NoAnswer:
                self._check_silence(began)

    def _check_silence(self, began: float) -> None:
        """Raises MkdTeacherTimeout if no answer has come for the time limit since `began`."""
        limit = self._ahead.timeout_s
        silent = time.monotonic() - max(began, self._connections.answered_at)
        if silent > limit:
            raise MkdTeacherTimeout(
                f"the teacher has not answered for {silent:.0f} s (--kd-teacher-timeout {limit:g}): start it again "
                "(mkd serve-teacher), and then this job"
            )

    def _read(self, count: int, answer: Message) -> Tensor:
        """The tensor of an answer for so many tokens, which is checked in the thread of the connections."""
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
        return answer.tensors[0]

    def _fetch_head(self, columns: Tensor) -> Tensor | None:
        """[columns, Ht] this rank's rows of the LM head; rows beyond the teacher's vocabulary are 0."""
        groups = self._groups
        fetches = groups.is_last_stage and groups.dp_cp.rank() == 0
        head = self._ranks.attempt(lambda: self._request_rows(columns.cpu()).to("cuda") if fetches else None)
        if not groups.is_last_stage:
            return None
        if head is None:
            head = torch.empty(len(columns), self._facts.width, dtype=self._facts.torch_dtype, device="cuda")
        if groups.dp_cp.size() > 1:
            dist.broadcast(head.view(torch.uint8), group=groups.dp_cp, group_src=0)
        return head

    def _request_rows(self, columns: Tensor) -> Tensor:
        facts = self._facts
        head = torch.zeros(len(columns), facts.width, dtype=facts.torch_dtype)
        known = columns[columns < facts.vocab]
        first, end = (int(known.min()), int(known.max()) + 1) if len(known) else (0, 0)
        most = max(1, MOST_ANSWER_BYTES // facts.bytes_per_token)
        for start in range(first, end, most):
            count = min(most, end - start)
            values = {"fingerprint": facts.fingerprint, "start": start, "count": count}
            answer = self._await(self._connections.submit(Message(Kind.HEAD, 0, values)))
            if [(tuple(one.shape), one.dtype) for one in answer.tensors] != [((count, facts.width), facts.torch_dtype)]:
                raise MkdTeacherError("the teacher answers with other rows of its LM head than those requested")
            here = ((columns >= start) & (columns < start + count)).nonzero().flatten()
            head[here] = answer.tensors[0].index_select(0, columns[here] - start)
        return head

    def signals(self, batches: Sequence[KDBatch]) -> Iterable[HiddenSignal | TopKSignal]:
        """See `Teacher.signals`. `prepare` has had the same microbatches, and the answers wait on the host."""
        if not self._groups.is_last_stage:
            return []
        signals = (self._signal(batch.number) for batch in batches)
        return signals if len(batches) > 1 else list(signals)

    def _signal(self, number: int) -> HiddenSignal | TopKSignal:
        """The signal of this rank's part of a microbatch."""
        found = self._uploads.take(number) if self._sends else None
        return self._answers.signal(self._tokens_of(self._whole[number]), found)

    def _received(self, number: int) -> Received:
        """The answer for a microbatch of the step."""
        pending = self._step[number]
        return pending.request.forward.wanted.long(), pending.answers[0].result()
