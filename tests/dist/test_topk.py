"""Losses with a sparse teacher, and the teacher's top-k, on vocabulary shards against the float64 definitions.

Without `-m slow`, each way into the loss runs with one number of shards; `-m slow` runs the rest.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward
from torch import Tensor

from mkd.losses import (
    LinearLogits,
    LossOutput,
    SparseTeacher,
    VocabLayout,
    fused_linear_topk_loss,
    teacher_top_k,
    topk_loss,
)
from mkd.losses.divergences import DIVERGENCES
from tests.dist.test_losses import WIDTHS, Communication, RankResult, shard_rows
from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import Layout, Models, kd_step
from tests.support.dist.outcome import total, whole_tensors
from tests.support.dist.pool import Pool
from tests.support.loss_cases import UPSTREAM, LossCase, make_inputs
from tests.support.poison import poisoned_memory
from tests.support.sparse_cases import SparseCase, check_values, expect_sparse, make_sparse
from tests.support.tolerance import FP32, GRADIENT, STEP_LOSS, assert_close_norm


def run_case(rank: int, world_size: int, case: SparseCase, entry: str) -> RankResult:
    """One loss on this rank's shards. `entry`: logits, fused, or fused with sequence parallelism ("sp")."""
    x, t = make_sparse(case)
    common: dict[str, Any] = dict(spec=case.full.spec, tail=case.tail, true_vocab=case.full.true_vocab, impl="eager")
    common["tp_group"] = torch.distributed.group.WORLD
    with poisoned_memory(), Communication() as forward:
        if entry == "logits":
            leaves = [shard_rows(x.student_logits.t(), rank, world_size).t().requires_grad_()]
            sums = dict(lse_temperature=t.temperature, teacher_tail_lse=t.tail_lse, counts=t.counts)
            out = topk_loss(leaves[0], t.ids, t.logits, t.lse, *x[6:9], **common, **sums)
        else:
            hidden = shard_rows(x.student_hidden, rank, world_size) if entry == "sp" else x.student_hidden
            leaves = [hidden.requires_grad_(), shard_rows(x.student_weight, rank, world_size).requires_grad_()]
            how = dict(sequence_parallel=entry == "sp", chunk_rows=case.full.chunk_rows)
            out = fused_linear_topk_loss(*leaves, t, *x[6:9], **common, **how)
    with poisoned_memory(), Communication() as backward:
        custom_backward(UPSTREAM * out.loss, None)
    detached = LossOutput(out.loss.detach(), out.ce, out.kd)
    return RankResult(detached, [leaf.grad for leaf in leaves], forward.launched, backward.launched)


def check(results: list[RankResult], case: SparseCase, entry: str) -> None:
    """Values are correct and bit-equal on every rank; gradients of all shards are correct, with exact zeros in
    padding."""
    expected = expect_sparse(case)
    for result in results:
        if entry != "logits":
            check_values(result.output, expected, FP32)
        assert torch.equal(result.output.kd, results[0].output.kd)
    if entry == "logits":
        whole = torch.cat([result.gradients[0] for result in results], 1)
        assert_close_norm(whole, expected.d_logits, FP32, "d_logits")
        assert not whole[:, case.full.true_vocab :].any()
        return
    weight = torch.cat([result.gradients[1] for result in results])
    assert_close_norm(weight, expected.d_weight, FP32, "d_weight")
    assert not weight[case.full.true_vocab :].any()
    hidden = [result.gradients[0] for result in results]
    for d_hidden in [torch.cat(hidden)] if entry == "sp" else hidden:
        assert_close_norm(d_hidden, expected.d_hidden, FP32, "d_hidden")


KINDS = [{"tail": "bucket"}, {"tail": "bucket", "with_tail_lse": False}, {"tail": "renormalize"}]


@pytest.mark.parametrize(
    "ranks, entry, temperature",
    [
        (1, "fused", 2.0),
        (2, "logits", 1.0),
        (2, "fused", 2.0),
        pytest.param(2, "sp", 1.0, marks=pytest.mark.slow),
        pytest.param(4, "logits", 2.0, marks=pytest.mark.slow),
        pytest.param(4, "fused", 1.0, marks=pytest.mark.slow),
        (4, "sp", 2.0),
    ],
)
def test_every_tail_and_divergence(
    gloo_pool: Callable[[int], Pool], ranks: int, entry: str, temperature: float
) -> None:
    for divergence in DIVERGENCES:
        vocab = ranks * WIDTHS[ranks]["empty shard" if ranks > 1 else "ragged"]
        full = LossCase(16, vocab=vocab, divergence=divergence, temperature=temperature, z_loss=1e-2)
        kinds = KINDS + ([{"sampled": True}] if divergence == "forward_kl" else [])
        for kind in kinds:
            case = SparseCase(full, **kind)
            results = gloo_pool(ranks).run(run_case, case, entry)
            check(results, case, entry)
            rounds = 1 if divergence in ("forward_kl", "reverse_kl") else 2
            chunks = 1 if entry == "logits" else 4
            gathers = [size for name, size in results[0].forward if name == "_allgather_base_"]
            assert len(gathers) == (0 if ranks == 1 else rounds * chunks + (entry == "sp"))
            if ranks > 1 and entry != "sp":
                assert max(gathers) <= 32 * (16 if entry == "logits" else 5)


def find(rank: int, world_size: int, k: int, sequence_parallel: bool) -> list[SparseTeacher]:
    """Top-k on this rank's shards of logits that are small integers, so that many are equal."""
    hidden, weight = tied()
    padded = torch.full((WIDTHS[world_size]["ragged"] * world_size, 4), 1e4).index_copy(0, torch.arange(29), weight)
    hidden = hidden.chunk(world_size)[rank] if sequence_parallel else hidden
    layout = VocabLayout(29, torch.distributed.group.WORLD, sequence_parallel)
    model = LinearLogits(hidden, padded.chunk(world_size)[rank])
    return teacher_top_k(model, k, temperatures=(1.0, 2.0), vocab=layout, chunk_rows=5)


def tied() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randint(-2, 3, (n, 4), generator=generator).float() for n in (16, 29)]
    return draw[0], draw[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 5, 12, 29])
def test_teacher_top_k(gloo_pool: Callable[[int], Pool], ranks: int, k: int) -> None:
    hidden, weight = tied()
    logits = hidden.double() @ weight.double().t()
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    rest = logits.scatter(1, ids, -torch.inf)
    for sequence_parallel in (False, True):
        for seen in gloo_pool(ranks).run(find, k, sequence_parallel):
            for found, temperature in zip(seen, (1.0, 2.0), strict=True):
                assert torch.equal(found.ids.long(), ids) and found.temperature == temperature
                assert torch.equal(found.logits.double(), logits.gather(1, ids))
                lse, tail = (torch.logsumexp(x / temperature, 1) for x in (logits, rest))
                assert_close_norm(found.lse, lse, FP32, "lse")
                assert torch.equal(found.tail_lse.isinf(), tail.isinf())
                if k < 29:
                    assert_close_norm(found.tail_lse, tail, FP32, "tail_lse")


def test_k_above_the_vocabulary_is_an_error() -> None:
    hidden, weight = tied()
    with pytest.raises(ValueError, match="k is 30; a vocabulary of 29"):
        teacher_top_k(LinearLogits(hidden, weight), 30, temperatures=(1.0,), vocab=VocabLayout(29))


def test_cases_hold_the_irregular_tokens() -> None:
    """Token 4 repeats an id, 5 has an empty slot, 6 has empty slots only, 2 must not be read."""
    teacher = make_sparse(SparseCase(LossCase(16))).teacher
    assert teacher.ids[4, 3] == teacher.ids[4, 0] and teacher.ids[5, 1] < 0 and (teacher.ids[6] < 0).all()
    assert teacher.logits[2].isnan().all() and make_inputs(LossCase(16)).kd_weight[2] == 0


def step_of(pool: Pool, layout: Layout, models: Models) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Mean losses, and whole gradients."""
    results = pool.run(kd_step, layout, models)
    sums = total([result["reports"] for result in results])
    parts = [part for result in results for part in result["gradients"]]
    return {name: value / count for name, (value, count) in sums.items()}, whole_tensors(parts, "gradient")


@pytest.mark.parametrize(
    "ranks, layout, k, truth",
    [
        pytest.param(1, Layout(), VOCAB, None, id="all columns"),
        pytest.param(2, Layout(tp=2, sp=True), 6, 6, id="tp2-sp", marks=pytest.mark.slow),
        pytest.param(4, Layout(tp=2, pp=2), 6, 6, id="tp2-pp2"),
    ],
)
def test_whole_step(gloo_pool: Callable[[int], Pool], ranks: int, layout: Layout, k: int, truth: int | None) -> None:
    """All columns are the full loss; some of them are the same loss in every layout, and another than the full one."""
    losses, gradients = step_of(gloo_pool(1), Layout(), Models(top_k=truth))
    seen_losses, seen = step_of(gloo_pool(ranks), layout, Models(top_k=k))
    assert seen_losses == pytest.approx(losses, rel=STEP_LOSS if k < VOCAB else FP32)
    for name, gradient in gradients.items():
        assert_close_norm(seen[name], gradient, GRADIENT, name)
    if k < VOCAB:
        assert abs(step_of(gloo_pool(1), Layout(), Models())[0]["kd"] - losses["kd"]) > 1e-3
