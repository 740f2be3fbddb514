"""The plan of a microbatch's text chunks: copies on the host in place of waits for the device."""

from dataclasses import replace

import torch
from torch import Tensor

from mkd.xtoken.loss.chunks import ChunkPlan, HostTokens, TokenChunks
from tests.support.xtoken_cases import XTokenCase, make

CASE = XTokenCase("p_kl", length=16)


def plan_of(chunks: TokenChunks, labels: Tensor, ce_weight: Tensor) -> ChunkPlan:
    vocabularies = CASE.student_vocab, CASE.teacher_vocab
    return ChunkPlan.of(chunks, labels, ce_weight, vocabularies=vocabularies, budget=11, device=torch.device("cpu"))


def tensors_of(plan: ChunkPlan) -> list[Tensor]:
    tensors = [plan.sent]
    for group in plan.groups:
        tensors += [x for x in (group.numbers, *group.student, *group.teacher) if isinstance(x, Tensor)]
    return tensors


def test_copies_on_the_host_replace_reading_the_device() -> None:
    x = make(CASE)
    wanted = plan_of(x.chunks, x.labels, x.ce_weight)
    known = HostTokens.copied(x.chunks, x.labels, x.ce_weight)
    # A tensor on "meta" cannot be copied to the host.
    labels, teacher_labels, ce_weight, weight = (
        t.to("meta") for t in (x.labels, x.chunks.teacher_labels, x.ce_weight, x.chunks.weight)
    )
    chunks = replace(x.chunks, teacher_labels=teacher_labels, weight=weight, on_host=known)
    seen = plan_of(chunks, labels, ce_weight)
    assert len(seen.groups) == len(wanted.groups) == 3 and seen.max_sent == 0
    assert any(not len(group.numbers) for group in seen.groups), "tokens without a chunk"
    for a, b in zip(tensors_of(seen), tensors_of(wanted), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_index_tensors_are_aligned() -> None:
    x = make(CASE)
    tensors = tensors_of(plan_of(x.chunks, x.labels, x.ce_weight))
    assert {t.storage_offset() * t.itemsize % 16 for t in tensors} == {0}
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1, "one copy"
