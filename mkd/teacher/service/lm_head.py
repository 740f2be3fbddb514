"""The LM head of a teacher service, which is requested once for each part of it that the student's ranks need."""

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.distributed.groups import Groups
from mkd.errors import MkdTeacherError
from mkd.teacher.run_ahead import ROUND_S, AllRanks
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message


def requests_head(groups: Groups) -> bool:
    """True on the ranks that request rows of the LM head: one per tensor-parallel rank of the last stage."""
    return groups.is_last_stage and groups.dp_cp.rank() == 0


def fetch_head(
    connections: TeacherConnections | None,
    facts: TeacherFacts,
    columns: Tensor,
    groups: Groups,
    ranks: AllRanks,
    timeout_s: float,
) -> Tensor | None:
    """This rank's rows of the LM head, [columns, Ht]; None off the last stage. Collective over all ranks.

    Args:
        connections: on the ranks of `requests_head`.
        facts: the teacher.
        columns: [columns] int64 ids of the rows, in this order; rows of ids beyond the teacher's vocabulary are 0.
        groups: the student's layout.
        ranks: how ranks fail together.
        timeout_s: seconds without an answer that are an error.

    Raises:
        MkdTeacherTimeout, MkdTeacherError: on all ranks, what one of them finds.
    """

    def request() -> Tensor | None:
        if not requests_head(groups):
            return None
        return _request_rows(connections, facts, columns.cpu(), timeout_s).to("cuda")

    head = ranks.attempt(request)
    if not groups.is_last_stage:
        return None
    if head is None:
        head = torch.empty(len(columns), facts.width, dtype=facts.torch_dtype, device="cuda")
    if groups.dp_cp.size() > 1:
        dist.broadcast(head.view(torch.uint8), group=groups.dp_cp, group_src=0)
    return head


def _request_rows(connections: TeacherConnections, facts: TeacherFacts, columns: Tensor, timeout_s: float) -> Tensor:
    head = torch.zeros(len(columns), facts.width, dtype=facts.torch_dtype)
    known = columns[columns < facts.vocab]
    first, end = (int(known.min()), int(known.max()) + 1) if len(known) else (0, 0)
    for start in range(first, end, facts.most_head_rows):
        count = min(facts.most_head_rows, end - start)
        values = {"fingerprint": facts.fingerprint, "start": start, "count": count}
        answer = _await(connections, connections.submit(Message(Kind.HEAD, 0, values)), timeout_s)
        if [(tuple(one.shape), one.dtype) for one in answer.tensors] != [((count, facts.width), facts.torch_dtype)]:
            raise MkdTeacherError("the teacher answers with other rows of its LM head than those requested")
        here = ((columns >= start) & (columns < start + count)).nonzero().flatten()
        head[here] = answer.tensors[0].index_select(0, columns[here] - start)
    return head


def _await(connections: TeacherConnections, answer: Future[Message], timeout_s: float) -> Message:
    began = time.monotonic()
    while True:
        try:
            return answer.result(timeout=ROUND_S)
        except NoAnswer:
            connections.check_silence(began, timeout_s)
