"""The losses on several ranks: every gradient against the one-rank float64 reference, and what is communicated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mkd.losses import LossOutput, fused_linear_loss, vocab_parallel_loss
from tests.dist.pool import Pool
from tests.loss_cases import UPSTREAM, Inputs, LossCase, expect, make_inputs
from tests.poison import poisoned_memory
from tests.tolerance import FP32, FP64, assert_close_norm

WIDTHS = {
    # ranks: columns a rank, so that 29 real ones end in the last shard, or before it
    1: {"ragged": 31},
    2: {"ragged": 15, "empty shard": 29},
    4: {"ragged": 9, "empty shard": 10},
    8: {"ragged": 4, "empty shard": 5},
}
LAYOUTS = [(ranks, name) for ranks, widths in WIDTHS.items() for name in widths]


class Communication(TorchDispatchMode):
    """Records the collectives that are launched under it: (name, bytes this rank sends)."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            sent = args[1] if "allgather" in func.__name__ or "reduce_scatter" in func.__name__ else args[0]
            sent = sent[0] if isinstance(sent, (list, tuple)) else sent
            self.launched.append((func.__name__.split(".")[0], sent.numel() * sent.element_size()))
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class RankResult:
    """What one rank saw."""

    output: LossOutput
    gradients: list[Tensor]
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]


def shard_rows(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    return tensor.chunk(world_size)[rank].clone()


def run_case(rank: int, world_size: int, case: LossCase, entry: str, fault: bool = False) -> RankResult:
    """One loss on this rank's shards. `entry`: logits, fused, or fused with sequence parallelism ("sp")."""
    group = torch.distributed.group.WORLD
    x: Inputs = make_inputs(case)
    common = {"spec": case.spec, "true_vocab": case.true_vocab, "tp_group": group}
    rows = (x.labels, x.ce_weight, x.kd_weight)
    with poisoned_memory(), Communication() as forward:
        if entry == "logits":
            shards = [shard_rows(t.t(), rank, world_size).t() for t in (x.student_logits, x.teacher_logits)]
            leaves = [shards[0].requires_grad_()]
            out = vocab_parallel_loss(*shards, *rows, **common)
        else:
            weights = [shard_rows(t, rank, world_size) for t in (x.student_weight, x.teacher_weight)]
            hidden = [x.student_hidden, x.teacher_hidden]
            if entry == "sp":
                hidden = [shard_rows(h, rank, world_size) for h in hidden]
            leaves = [hidden[0].requires_grad_(), weights[0].requires_grad_()]
            out = fused_linear_loss(
                hidden[0],
                weights[0],
                hidden[1],
                weights[1],
                *rows,
                **common,
                sequence_parallel=entry == "sp",
                chunk_rows=case.chunk_rows,
            )
    loss = out.loss
    if (
        fault
    ):  # what differentiating a sum over ranks does: the right value with a gradient of world_size times the right
        loss = loss + (world_size - 1) * (loss - loss.detach())
    with poisoned_memory(), Communication() as backward:
        custom_backward(UPSTREAM * loss, None)  # as megatron's schedules do
    detached = LossOutput(loss.detach(), out.ce, out.kd)
    return RankResult(detached, [leaf.grad for leaf in leaves], forward.launched, backward.launched)


def check(results: list[RankResult], case: LossCase, entry: str, tol: float) -> None:
    """Values on every rank bit-equal and right; gradients of all shards right, with exact zeros in padding."""
    expected = expect(case)
    for rank, result in enumerate(results):
        for name in ("loss", "ce", "kd"):
            actual, wanted = getattr(result.output, name), getattr(expected, name)
            assert (actual is None) == (wanted is None), name
            if wanted is not None:
                assert_close_norm(actual, wanted, tol, f"{name} on rank {rank}")
                assert torch.equal(actual, getattr(results[0].output, name)), f"{name} differs between ranks"
    if entry == "logits":
        d_logits = torch.cat([r.gradients[0] for r in results], dim=1)
        assert_close_norm(d_logits, expected.d_logits, tol, "d_logits")
        assert not d_logits[:, case.true_vocab :].any()
        return
    d_weight = torch.cat([r.gradients[1] for r in results])
    assert_close_norm(d_weight, expected.d_weight, tol, "d_weight")
    assert not d_weight[case.true_vocab :].any()
    if entry == "sp":
        assert_close_norm(torch.cat([r.gradients[0] for r in results]), expected.d_hidden, tol, "d_hidden")
    else:
        for rank, result in enumerate(results):
            assert_close_norm(result.gradients[0], expected.d_hidden, tol, f"d_hidden on rank {rank}")


def case_of(ranks: int, layout: str, entry: str, **changes: Any) -> LossCase:
    rows = 16 if entry == "sp" else 13
    return LossCase(rows=rows, vocab=ranks * WIDTHS[ranks][layout], **changes)


@pytest.mark.parametrize("entry", ["logits", "fused", "sp"])
@pytest.mark.parametrize("ranks, layout", LAYOUTS)
def test_every_layout(gloo_pool: Callable[[int], Pool], ranks: int, layout: str, entry: str) -> None:
    case = case_of(ranks, layout, entry, temperature=2.0)
    check(gloo_pool(ranks).run(run_case, case, entry), case, entry, FP32)


@pytest.mark.parametrize("entry", ["logits", "fused", "sp"])
@pytest.mark.parametrize("terms", ["ce", "kd", "ce+kd"])
@pytest.mark.parametrize("temperature, squared", [(1.0, True), (2.0, False), (0.5, True)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_terms_and_temperatures(
    gloo_pool: Callable[[int], Pool], ranks: int, temperature: float, squared: bool, terms: str, entry: str
) -> None:
    changes = {"temperature": temperature, "temperature_squared": squared, "terms": terms}
    case = case_of(ranks, "empty shard", entry, **changes)
    check(gloo_pool(ranks).run(run_case, case, entry), case, entry, FP32)


@pytest.mark.parametrize("entry", ["logits", "fused", "sp"])
def test_float64_is_exact(gloo_pool: Callable[[int], Pool], entry: str) -> None:
    case = case_of(4, "empty shard", entry, temperature=2.0, dtype=torch.float64)
    check(gloo_pool(4).run(run_case, case, entry), case, entry, FP64)


@pytest.mark.parametrize("entry", ["logits", "fused", "sp"])
@pytest.mark.parametrize("changes", [{"all_masked": True}, {"rows": 0}], ids=["all masked", "no rows"])
def test_nothing_to_learn(gloo_pool: Callable[[int], Pool], entry: str, changes: dict) -> None:
    case = dataclasses.replace(case_of(2, "ragged", entry), **changes)
    for result in gloo_pool(2).run(run_case, case, entry):
        assert result.output.loss.item() == 0
        for gradient in result.gradients:
            assert not gradient.any() and not gradient.isnan().any()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("entry, wrong", [("logits", "d_logits"), ("fused", "d_weight"), ("sp", "d_weight")])
def test_gradient_times_ranks_is_caught(gloo_pool: Callable[[int], Pool], ranks: int, entry: str, wrong: str) -> None:
    case = case_of(ranks, "ragged", entry)
    results = gloo_pool(ranks).run(run_case, case, entry, True)
    with pytest.raises(AssertionError, match=wrong):
        check(results, case, entry, FP32)


@pytest.mark.parametrize(
    "terms, temperature, numbers", [("ce", 1.0, 3), ("kd", 2.0, 5), ("ce+kd", 1.0, 6), ("ce+kd", 2.0, 7)]
)
def test_launches_and_bytes(gloo_pool: Callable[[int], Pool], terms: str, temperature: float, numbers: int) -> None:
    """One all-gather a chunk in forward, of at most 32 bytes a row; in backward the hidden states' reduction alone."""
    for entry in ("logits", "fused", "sp"):
        case = case_of(2, "ragged", entry, terms=terms, temperature=temperature)
        chunks = [case.rows] if entry == "logits" else [5, 5, case.rows - 10] if entry == "fused" else [5, 5, 5, 1]
        statistics = [("_allgather_base_", numbers * 4 * rows) for rows in chunks]
        assert numbers * 4 <= 32
        models = [case.student_width] + [case.teacher_width] * ("kd" in terms)
        gathers = [("_allgather_base_", case.rows // 2 * width * 4) for width in models] if entry == "sp" else []
        reduction = {"logits": [], "fused": ["allreduce_"], "sp": ["_reduce_scatter_base_"]}[entry]
        for result in gloo_pool(2).run(run_case, case, entry):
            assert result.forward == gathers + statistics
            assert [name for name, _ in result.backward] == reduction
