"""Losses between tokenizers over tensor- and context-parallel ranks against their float64 definitions."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses import LinearLogits, LossOptions, LossOutput, TokenWeights, VocabLayout
from mkd.losses.divergences import DIVERGENCES
from mkd.xtoken.loss.chunks import TokenChunks
from mkd.xtoken.loss.xtoken_loss import xtoken_loss
from tests.support.dist.pool import Pool
from tests.support.loss_cases import INTERPRETED, UPSTREAM
from tests.support.poison import poisoned_memory
from tests.support.tolerance import FP32, FP64, assert_close_norm
from tests.support.xtoken_cases import KINDS, Microbatch, XTokenCase, check_values, expect, make, rows_of_rank


@dataclasses.dataclass(frozen=True)
class Layout:
    tp: int = 1
    cp: int = 1
    sp: bool = False
    main_grad: bool = False
    """The LM head's gradient goes straight into an fp32 buffer, which holds ones before."""
    impl: str = "auto"
    fault: str = ""
    """"tp", "cp": gradients as many times too large; "mean": each rank divides by its own number of chunks."""

    @property
    def ranks(self) -> int:
        return self.tp * self.cp


LAYOUTS = [Layout(tp=2), Layout(cp=2), Layout(tp=2, cp=2), Layout(tp=2, cp=2, sp=True), Layout(tp=2, sp=True)]


class RankResult(NamedTuple):
    output: LossOutput
    d_hidden: Tensor
    d_weight: Tensor


def groups(rank: int, layout: Layout) -> tuple[ProcessGroup, ProcessGroup]:
    """Tensor-parallel ranks are neighbors."""
    grid = torch.arange(layout.ranks).view(layout.cp, layout.tp)
    made = [[torch.distributed.new_group(ranks.tolist()) for ranks in lines] for lines in (grid, grid.t())]
    return made[0][rank // layout.tp], made[1][rank % layout.tp]


def sliced(x: Microbatch, rows: Tensor) -> Microbatch:
    """The part of a context-parallel rank."""
    c = x.chunks
    return x._replace(
        student_hidden=x.student_hidden[rows],
        teacher_hidden=x.teacher_hidden[rows],
        labels=x.labels[rows],
        ce_weight=None if x.ce_weight is None else x.ce_weight[rows],
        chunks=TokenChunks(
            c.student[rows],
            c.student_first[rows],
            c.teacher[rows],
            c.teacher_first[rows],
            c.teacher_labels[rows],
            c.weight,
        ),
    )


def run_case(rank: int, world_size: int, case: XTokenCase, layout: Layout) -> RankResult:
    tp_group, cp_group = groups(rank, layout)
    tp_rank, cp_rank = tp_group.rank(), cp_group.rank()
    x = sliced(make(case), rows_of_rank(case, cp_rank, layout.cp))
    vocabulary = x.vocabulary(case, tp_rank, layout.tp)
    hidden = [h.chunk(layout.tp)[tp_rank] if layout.sp else h for h in (x.student_hidden, x.teacher_hidden)]
    leaves = [hidden[0].clone().requires_grad_(), x.student_weight.chunk(layout.tp)[tp_rank].clone().requires_grad_()]
    if layout.main_grad:
        leaves[1].main_grad = torch.ones_like(leaves[1])
    with poisoned_memory():
        out = xtoken_loss(
            LinearLogits(*leaves),
            LinearLogits(hidden[1], x.teacher_weight[vocabulary.teacher_columns]),
            TokenWeights(x.labels, x.ce_weight, None),
            replace(x.chunks, cp_group=cp_group),
            vocabulary=vocabulary,
            spec=case.spec,
            vocab=VocabLayout(case.student_vocab, tp_group, layout.sp),
            options=LossOptions(chunk_rows=case.chunk_rows, impl=layout.impl),
            uncommon_top_k=case.uncommon_top_k,
            upstream=UPSTREAM if layout.main_grad else None,
        )
        loss = out.loss
        if layout.fault in ("tp", "cp"):
            loss = loss + (loss - loss.detach())
        elif layout.fault:
            loss = loss / (out.kd != 0).sum().clamp_min(1)
        custom_backward(UPSTREAM * loss, None)
    d_weight = leaves[1].main_grad - 1.0 if layout.main_grad else leaves[1].grad
    return RankResult(LossOutput(loss.detach(), out.ce, out.kd), leaves[0].grad, d_weight)


def check(results: list[RankResult], case: XTokenCase, layout: Layout, tol: float) -> None:
    """Sums over context-parallel ranks are right; tensor-parallel ranks agree to the last bit."""
    expected, tp = expect(case), layout.tp
    for r, result in enumerate(results):
        for mine, theirs in zip(result.output, results[r - r % tp].output, strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs), f"rank {r} and its tensor-parallel peer differ"
    firsts = results[::tp]
    rows = torch.cat([rows_of_rank(case, rank, layout.cp) for rank in range(layout.cp)])
    ce = None
    if case.with_ce:
        ce = torch.empty(len(rows), dtype=case.dtype)
        ce[rows] = torch.cat([r.output.ce for r in firsts])
    sums = LossOutput(sum(r.output.loss for r in firsts), ce, sum(r.output.kd for r in firsts))
    check_values(sums, expected, tol)
    owners = torch.stack([r.output.kd != 0 for r in firsts]).sum(dim=0)
    assert owners.max() <= 1
    d_weight = torch.cat([sum(results[c * tp + t].d_weight for c in range(layout.cp)) for t in range(tp)])
    assert_close_norm(d_weight, expected.d_weight, tol, "d_weight")
    assert not d_weight[case.student_vocab :].any()
    for t in range(1 if layout.sp else tp):
        parts = [r.d_hidden for r in results] if layout.sp else [r.d_hidden for r in results[t::tp]]
        d_hidden = torch.empty_like(torch.cat(parts))
        d_hidden[rows] = torch.cat(parts)
        assert_close_norm(d_hidden, expected.d_hidden, tol, "d_hidden")


def name_of(layout: Layout) -> str:
    return f"tp{layout.tp}-cp{layout.cp}" + "-sp" * layout.sp


every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_chunks_lie_across_ranks() -> None:
    """The cases have what they are for: chunks with rows on both ranks, and teacher rows on another than the owner."""
    case = XTokenCase()
    chunks = make(case).chunks
    counting = set((chunks.weight != 0).nonzero()[:, 0].tolist())
    rows = [rows_of_rank(case, rank, 2) for rank in (0, 1)]
    student, teacher = ([set(side[r].tolist()) & counting for r in rows] for side in (chunks.student, chunks.teacher))
    assert student[0] & student[1] and teacher[0] & teacher[1]
    assert (student[0] - student[1]) & (teacher[1] - teacher[0])


@INTERPRETED
@pytest.mark.parametrize("kind", ["p_kl", "gold"])
def test_triton(gloo_pool: Callable[[int], Pool], kind: str) -> None:
    case, layout = XTokenCase(kind, "jsd", temperature=2.0, z_loss=1e-2, length=6), Layout(tp=2, impl="triton")
    check(gloo_pool(2).run(run_case, case, layout), case, layout, FP32)


@every_layout
@every_kind
def test_every_layout(gloo_pool: Callable[[int], Pool], kind: str, layout: Layout) -> None:
    for divergence in ("forward_kl", "jsd"):
        case = XTokenCase(kind, divergence, temperature=2.0, z_loss=1e-2)
        check(gloo_pool(layout.ranks).run(run_case, case, layout), case, layout, FP32)


@every_kind
@pytest.mark.parametrize("changes", [{"dtype": torch.float64}, {"masked": "rank"}, {"with_ce": False}], ids=str)
def test_masked_chunks_have_no_effect(gloo_pool: Callable[[int], Pool], kind: str, changes: dict) -> None:
    """Among others a rank without a row that counts, which takes part in all exchanges."""
    case, layout = XTokenCase(kind, "reverse_kl", **changes), Layout(tp=2, cp=2)
    check(gloo_pool(layout.ranks).run(run_case, case, layout), case, layout, FP64 if "dtype" in changes else FP32)


@every_kind
@pytest.mark.parametrize("masked", ["chunks", "all"])
def test_nothing_to_compare(gloo_pool: Callable[[int], Pool], kind: str, masked: str) -> None:
    """No chunk that counts on any rank, with and without cross-entropy: finite, and every rank comes back."""
    case, layout = XTokenCase(kind, masked=masked), LAYOUTS[3]
    results = gloo_pool(layout.ranks).run(run_case, case, layout)
    check(results, case, layout, FP32)
    assert not any(result.output.kd.any() for result in results)


@every_kind
def test_gradient_into_a_buffer(gloo_pool: Callable[[int], Pool], kind: str) -> None:
    case = XTokenCase(kind, temperature=2.0)
    layout = Layout(tp=2, cp=2, sp=True, main_grad=True)
    check(gloo_pool(layout.ranks).run(run_case, case, layout), case, layout, FP32)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence(gloo_pool: Callable[[int], Pool], divergence: str) -> None:
    case, layout = XTokenCase(divergence=divergence, temperature=0.7), LAYOUTS[2]
    check(gloo_pool(layout.ranks).run(run_case, case, layout), case, layout, FP32)


@pytest.mark.parametrize("fault, wrong", [("tp", "d_weight"), ("cp", "d_weight"), ("mean", "loss")])
def test_faults_are_caught(gloo_pool: Callable[[int], Pool], fault: str, wrong: str) -> None:
    layout = Layout(tp=2 if fault == "tp" else 1, cp=1 if fault == "tp" else 2, fault=fault)
    results = gloo_pool(layout.ranks).run(run_case, XTokenCase(), layout)
    with pytest.raises(AssertionError, match=wrong):
        check(results, XTokenCase(), layout, FP32)
