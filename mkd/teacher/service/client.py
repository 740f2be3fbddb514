"""The teacher that a service computes; no model weights but the LM head are on the student's ranks."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.errors import MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.losses import LogitMap
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.run_ahead import ROUND_S, AllRanks, PendingRequest, RequestQueue, RunAhead
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.server import MOST_ANSWER_BYTES


@dataclass(frozen=True)
class _HiddenRequest:
    """A forward request and the size of its answer. See `mkd.teacher.run_ahead.BatchRequest`."""

    forward: ForwardRequest
    key: bytes
    answer_bytes: int


class ServedTeacher:
    """Requests are sent by one rank per model replica: the first tensor- and context-parallel rank of its last stage.

    That rank receives the hidden states of whole rows once and scatters them, so that every other rank gets its own
    slice only. `prepare` returns when all answers of the step have arrived: a failure is then raised on all ranks,
    before any of them has begun the step.
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
    ) -> None:
        """Fetch the LM head. Collective over all ranks.

        Args:
            connections: see `needs_connections`.
            facts: the teacher.
            groups: the student's layout.
            ahead: options of running ahead.
            head_columns: [columns] int64 ids whose rows of the LM head are `HiddenSignal.head` on this tensor-parallel
                rank, in this order; rows of ids beyond the teacher's vocabulary are 0.
            sequence_parallel: True if the student's tensor-parallel ranks hold slices of the sequence.
            view: index in `KDBatch.teacher_views` of the tokens that the teacher reads; None: the student's tokens.
        """
        self._connections, self._facts, self._groups, self._options = connections, facts, groups, ahead
        self._sequence_parallel, self._view = sequence_parallel, view
        self._sends = groups.leads_replica
        self._ranks = AllRanks(ahead.timeout_s)
        self._queue = RequestQueue(ahead, self._request, self._send)
        self._step: list[PendingRequest[_HiddenRequest]] = []
        self._whole: list[KDBatch] = []
        self._head = self._fetch_head(head_columns)

    @staticmethod
    def needs_connections(groups: Groups) -> bool:
        """True on ranks that send requests: for microbatches, or for rows of the LM head."""
        return groups.leads_replica or (groups.is_last_stage and groups.dp_cp.rank() == 0)

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return False

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return {}

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
        self._ranks.wait(step, self._check, self._check_silence, upcoming.is_stopping)
        self._step = step
        return self._whole

    def _request(self, batch: KDBatch) -> _HiddenRequest:
        """The request for those tokens of a whole microbatch that the loss reads."""
        own, wanted = self._tokens_of(batch), batch.kd_mask != 0.0
        if self._view is not None:
            wanted = batch.teacher_views[self._view].chunk >= 0
        forward = ForwardRequest.of_batch(own, (own.ce_mask != 0.0) | wanted)
        return _HiddenRequest(forward, forward.key, len(forward.wanted) * self._facts.bytes_per_token)

    def _tokens_of(self, batch: KDBatch) -> KDBatch:
        """A whole microbatch in the teacher's tokenizer."""
        return batch if self._view is None else batch.teacher_views[self._view].batch

    def _send(self, request: _HiddenRequest) -> list[Future[Message]]:
        values = {"fingerprint": self._facts.fingerprint}
        return [self._connections.submit(Message(Kind.FORWARD, 0, values, request.forward.tensors))]

    def _await(self, answer: Future[Message]) -> Message:
        began = time.monotonic()
        while True:
            try:
                return answer.result(timeout=ROUND_S)
            except NoAnswer:
                self._check_silence(began)

    def _check_silence(self, began: float) -> None:
        """Raises MkdTeacherTimeout if no answer has come for the time limit since `began`."""
        limit = self._options.timeout_s
        silent = time.monotonic() - max(began, self._connections.answered_at)
        if silent > limit:
            raise MkdTeacherTimeout(
                f"the teacher has not answered for {silent:.0f} s (--kd-teacher-timeout {limit:g}): start it again "
                "(mkd serve-teacher), and then this job"
            )

    def _check(self, pending: PendingRequest[_HiddenRequest]) -> None:
        (answer,), facts, count = pending.answers, self._facts, len(pending.request.forward.wanted)
        answer = answer.result()
        if answer.kind != Kind.HIDDEN or answer.values.get("fingerprint") != facts.fingerprint:
            raise MkdTeacherError(f"the teacher answers with {answer.kind.name} of {answer.values}: is it another one?")
        shapes = [(tuple(one.shape), one.dtype) for one in answer.tensors]
        if shapes != [((count, facts.width), facts.torch_dtype)]:
            raise MkdTeacherError(
                f"the teacher answers with hidden states of {shapes}; {count} tokens of width {facts.width} in "
                f"{facts.dtype} were requested: is it the same version of mkd?"
            )
        if not bool(answer.tensors[0].isfinite().all()):
            raise MkdNumericError(
                f"the hidden states of the teacher {facts.fingerprint} ({facts.description}) are not finite: its "
                "weights are damaged, or it overflows in its precision (--kd-teacher-dtype of mkd serve-teacher)"
            )

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

    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """See `Teacher.signals`. `prepare` has had the same microbatches."""
        if not self._groups.is_last_stage:
            return []
        logit_map = LogitMap(self._facts.logit_scale, self._facts.logit_softcap)
        return [HiddenSignal(self._hidden(batch), self._head, logit_map, self._view) for batch in batches]

    def _hidden(self, batch: KDBatch) -> Tensor:
        """This rank's slice of the hidden states of a microbatch: [s/cp, b, Ht], or [s/cp/tp, b, Ht]."""
        groups, whole = self._groups, self._tokens_of(self._whole[batch.number])
        rows, length = whole.tokens.shape
        cp, tp = groups.cp, groups.tp
        parts, shape = None, (length // cp.size(), rows, self._facts.width)
        if self._sends:
            hidden, size = self._dense(whole, self._step[batch.number]), cp.size()
            places = (dual_chunk_positions(whole.bounds, rank, size).to(hidden.device) for rank in range(size))
            parts = [hidden] if size == 1 else [hidden.index_select(0, one) for one in places]
        own = self._scatter(parts, shape, cp) if tp.rank() == 0 else None
        if tp.size() == 1:
            return own
        if not self._sequence_parallel:
            own = self._empty(shape) if own is None else own
            dist.broadcast(own.view(torch.uint8), group=tp, group_src=0)
            return own
        parts = None if own is None else [one.contiguous() for one in own.chunk(tp.size())]
        return self._scatter(parts, (shape[0] // tp.size(), *shape[1:]), tp)

    def _scatter(self, parts: list[Tensor] | None, shape: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        """Rank 0 of a group has one part per rank; returns this rank's."""
        if group.size() == 1:
            return parts[0]
        own = self._empty(shape)
        # As bytes, because gloo does not scatter every dtype.
        parts = None if parts is None else [one.view(torch.uint8) for one in parts]
        dist.scatter(own.view(torch.uint8), parts, group=group, group_src=0)
        return own

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._facts.torch_dtype, device="cuda")

    def _dense(self, whole: KDBatch, pending: PendingRequest[_HiddenRequest]) -> Tensor:
        """[s, b, Ht] on the device; 0 for tokens that were not wanted."""
        rows, length = whole.tokens.shape
        wanted = pending.request.forward.wanted.long().pin_memory().to("cuda", non_blocking=True)
        found = pending.answers[0].result().tensors[0].pin_memory().to("cuda", non_blocking=True)
        places = wanted % length * rows + wanted // length
        hidden = torch.zeros(length * rows, self._facts.width, dtype=self._facts.torch_dtype, device="cuda")
        return hidden.index_copy_(0, places, found).view(length, rows, self._facts.width)
