"""The losses over objects: the same numbers as over plain tensors, for either kind of teacher, and their errors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mkd.losses import (
    LinearLogits,
    LossOptions,
    LossOutput,
    SparseTeacher,
    TokenWeights,
    VocabLayout,
    loss_from_hidden,
    loss_from_logits,
)
from mkd.losses.inputs import LogitMap, LogitMaps
from tests.support.loss_cases import UPSTREAM, LossCase, make_inputs, run_fused, run_logits
from tests.support.sparse_cases import SparseCase, make_sparse, run_fused_topk, run_topk

CASE = LossCase(divergence="jsd", temperature=2.0, z_loss=1e-2, biased=True, maps=LogitMaps(LogitMap(0.5, 4.0)))
VOCAB = VocabLayout(CASE.true_vocab)


def assert_same(output: LossOutput, leaves: list[Tensor], expected: LossOutput, gradients: list[Tensor]) -> None:
    """Values and gradients are bit-equal."""
    for name in LossOutput._fields:
        assert torch.equal(getattr(output, name), getattr(expected, name)), name
    for ours, theirs in zip(torch.autograd.grad(UPSTREAM * output.loss, leaves), gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_dense_teacher_from_hidden_states(impl: str) -> None:
    x = make_inputs(CASE)
    student = LinearLogits(x.student_hidden, x.student_weight, CASE.maps.student, x.student_bias)
    leaves = [t.requires_grad_() for t in (student.hidden, student.weight, student.bias)]
    teacher = LinearLogits(x.teacher_hidden, x.teacher_weight, CASE.maps.teacher, x.teacher_bias)
    tokens, options = TokenWeights(x.labels, x.ce_weight, x.kd_weight), LossOptions(CASE.chunk_rows, impl=impl)
    output = loss_from_hidden(student, teacher, tokens, spec=CASE.spec, vocab=VOCAB, options=options)
    expected, *gradients = run_fused(CASE, impl)
    assert_same(output, leaves, expected, gradients)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_sparse_teacher_from_hidden_states(tail: str) -> None:
    case = SparseCase(replace(CASE, biased=False), tail=tail)
    x, teacher = make_sparse(case)
    student = LinearLogits(x.student_hidden.requires_grad_(), x.student_weight.requires_grad_(), CASE.maps.student)
    tokens, options = TokenWeights(x.labels, x.ce_weight, x.kd_weight), LossOptions(CASE.chunk_rows, impl="eager")
    output = loss_from_hidden(student, teacher, tokens, spec=CASE.spec, vocab=VOCAB, options=options, tail=tail)
    expected, *gradients = run_fused_topk(case)
    assert_same(output, [student.hidden, student.weight], expected, gradients)


def test_both_teachers_from_logits() -> None:
    case = SparseCase(replace(CASE, maps=LogitMaps(), biased=False))
    x, sparse = make_sparse(case)
    tokens, logits = TokenWeights(x.labels, x.ce_weight, x.kd_weight), x.student_logits.requires_grad_()
    for teacher, run in ((x.teacher_logits, lambda: run_logits(case.full)), (sparse, lambda: run_topk(case))):
        output = loss_from_logits(logits, teacher, tokens, spec=CASE.spec, vocab=VOCAB, impl="eager")
        expected, gradient = run()
        assert_same(output, [logits], expected, [gradient])


def test_no_teacher() -> None:
    """Without KD weights a teacher is not read; with them it is needed."""
    x = make_inputs(CASE)
    student = LinearLogits(x.student_hidden, x.student_weight)
    unread = LinearLogits(x.teacher_hidden[:1], x.teacher_weight[:1])
    tokens, common = TokenWeights(x.labels, x.ce_weight, None), dict(spec=CASE.spec, vocab=VOCAB)
    outputs = [loss_from_hidden(student, teacher, tokens, **common) for teacher in (None, unread)]
    assert outputs[0].kd is None and torch.equal(outputs[0].loss, outputs[1].loss)
    with pytest.raises(ValueError, match="teacher is None"):
        loss_from_hidden(student, None, TokenWeights(x.labels, None, x.kd_weight), **common)


def test_flatten_tokens() -> None:
    """[b, s] signals become [s * b] tokens, sequence first."""
    ids = torch.arange(24).view(2, 3, 4)
    teacher = SparseTeacher(ids, ids.float(), ids[..., 0].float(), temperature=2.0, counts=ids)
    flat = teacher.flatten_tokens()
    assert flat.ids.shape == (6, 4) and flat.ids[1].tolist() == ids[1, 0].tolist()
    assert torch.equal(flat.lse, flat.ids[:, 0].float()) and torch.equal(flat.counts, flat.ids)
    assert flat.tail_lse is None and flat.temperature == 2.0


def test_layout_of_one_rank() -> None:
    layout, hidden = VocabLayout(29, sequence_parallel=True), torch.randn(3, 4)
    shard = layout.shard(32)
    assert (layout.rank, layout.size, shard.start, shard.columns) == (0, 1, 0, 29)
    assert layout.gather_hidden(hidden) is hidden and layout.gather_trained_hidden(hidden) is hidden
    with pytest.raises(ValueError, match="true_vocab is 29"):
        layout.shard(28)
