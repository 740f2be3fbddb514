"""The losses on several ranks: every gradient against the one-rank float64 reference, and what is communicated."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mkd.losses import LossOutput, LossSpec, fused_linear_loss, reference, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import LogitMap, LogitMaps
from tests.support.dist.pool import Pool
from tests.support.loss_cases import INTERPRETED, UPSTREAM, Inputs, LossCase, expect, make_inputs
from tests.support.poison import poisoned_memory
from tests.support.tolerance import FP32, FP64, assert_close_norm

WIDTHS = {
    # ranks: columns per rank: the 29 real ones end in the last shard, or before it
    1: {"ragged": 31},
    2: {"ragged": 15, "empty shard": 29},
    4: {"ragged": 9, "empty shard": 10},
    8: {"ragged": 4, "empty shard": 5},
}
ENTRIES = ["logits", "fused", "sp"]
ALL_DIVERGENCES_AT = [(2, "empty shard"), (8, "empty shard")]
LAYOUTS = [(ranks, name) for ranks, widths in WIDTHS.items() for name in widths]


class Communication(TorchDispatchMode):
    """Records the collectives launched in its scope: (name, bytes that this rank sends)."""

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
    """Results of one rank."""

    output: LossOutput
    gradients: list[Tensor]
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]


def shard_rows(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    return tensor.chunk(world_size)[rank].clone()


def run_case(
    rank: int, world_size: int, case: LossCase, entry: str, fault: bool = False, impl: str = "eager"
) -> RankResult:
    """One loss on this rank's shards. `entry`: logits, fused, or fused with sequence parallelism ("sp")."""
    group = torch.distributed.group.WORLD
    x: Inputs = make_inputs(case)
    common = {"spec": case.spec, "true_vocab": case.true_vocab, "tp_group": group, "impl": impl}
    rows = (x.labels, x.ce_weight, x.kd_weight)
    with poisoned_memory(), Communication() as forward:
        if entry == "logits":
            shards = [shard_rows(t.t(), rank, world_size).t() for t in (x.student_logits, x.teacher_logits)]
            leaves = [shards[0].requires_grad_()]
            out = vocab_parallel_loss(*shards, *rows, **common)
        else:
            heads = (x.student_weight, x.teacher_weight, x.student_bias, x.teacher_bias)
            weights = [None if t is None else shard_rows(t, rank, world_size) for t in heads]
            hidden = [x.student_hidden, x.teacher_hidden]
            if entry == "sp":
                hidden = [shard_rows(h, rank, world_size) for h in hidden]
            leaves = [t.requires_grad_() for t in (hidden[0], weights[0], weights[2]) if t is not None]
            out = fused_linear_loss(
                hidden[0],
                weights[0],
                hidden[1],
                weights[1],
                *rows,
                **common,
                sequence_parallel=entry == "sp",
                chunk_rows=case.chunk_rows,
                student_bias=weights[2],
                teacher_bias=weights[3],
                maps=case.maps,
            )
    loss = out.loss
    if fault:
        # what differentiating a sum over ranks does: the right value, and world_size times the gradient
        loss = loss + (world_size - 1) * (loss - loss.detach())
    with poisoned_memory(), Communication() as backward:
        custom_backward(UPSTREAM * loss, None)  # as megatron's schedules do
    detached = LossOutput(loss.detach(), out.ce, out.kd)
    return RankResult(detached, [leaf.grad for leaf in leaves], forward.launched, backward.launched)


def check(results: list[RankResult], case: LossCase, entry: str, tol: float) -> None:
    """Values are correct and bit-equal on every rank; gradients of all shards are correct, with exact zeros in
    padding."""
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
    if case.biased:
        d_bias = torch.cat([r.gradients[2] for r in results])
        assert_close_norm(d_bias, expected.d_bias, tol, "d_bias")
    if entry == "sp":
        assert_close_norm(torch.cat([r.gradients[0] for r in results]), expected.d_hidden, tol, "d_hidden")
    else:
        for rank, result in enumerate(results):
            assert_close_norm(result.gradients[0], expected.d_hidden, tol, f"d_hidden on rank {rank}")


def case_of(ranks: int, layout: str, entry: str, **changes: Any) -> LossCase:
    rows = 16 if entry == "sp" else 13
    return LossCase(rows=rows, vocab=ranks * WIDTHS[ranks][layout], **changes)


every_entry = pytest.mark.parametrize("entry", ENTRIES)
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


@every_entry
@pytest.mark.parametrize(
    "ranks, layout, divergence",
    [
        (ranks, layout, divergence)
        for ranks, layout in LAYOUTS
        for divergence in (DIVERGENCES if (ranks, layout) in ALL_DIVERGENCES_AT else ["forward_kl", "jsd"])
    ],
)
def test_every_layout_and_divergence(
    gloo_pool: Callable[[int], Pool], ranks: int, layout: str, divergence: str, entry: str
) -> None:
    case = case_of(ranks, layout, entry, temperature=2.0, divergence=divergence, z_loss=1e-2)
    check(gloo_pool(ranks).run(run_case, case, entry), case, entry, FP32)


@every_entry
@pytest.mark.parametrize(
    "terms, divergence", [("ce", "jsd"), ("kd", "forward_kl"), ("kd", "skew_reverse_kl"), ("ce+kd", "reverse_kl")]
)
@pytest.mark.parametrize(
    "ranks, temperature, squared", [(2, 1.0, True), (2, 2.0, False), (2, 0.5, True), (4, 0.5, True)]
)
def test_terms_and_temperatures(
    gloo_pool: Callable[[int], Pool],
    ranks: int,
    temperature: float,
    squared: bool,
    terms: str,
    divergence: str,
    entry: str,
) -> None:
    changes = {"temperature": temperature, "temperature_squared": squared, "terms": terms, "divergence": divergence}
    case = case_of(ranks, "empty shard", entry, **changes)
    check(gloo_pool(ranks).run(run_case, case, entry), case, entry, FP32)


@every_entry
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "tvd"])
def test_float64_is_exact(gloo_pool: Callable[[int], Pool], divergence: str, entry: str) -> None:
    case = case_of(4, "empty shard", entry, temperature=2.0, dtype=torch.float64, divergence=divergence)
    check(gloo_pool(4).run(run_case, case, entry), case, entry, FP64)


@pytest.mark.parametrize("entry", ["fused", "sp"])
@pytest.mark.parametrize("chunk_rows", [1, 7, None])
def test_bias_maps_and_chunks(gloo_pool: Callable[[int], Pool], chunk_rows: int | None, entry: str) -> None:
    maps = LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0))
    changes = {"maps": maps, "biased": True, "chunk_rows": chunk_rows, "divergence": "jsd", "z_loss": 1e-2}
    case = case_of(2, "ragged", entry, **changes)
    check(gloo_pool(2).run(run_case, case, entry), case, entry, FP32)


@every_entry
@pytest.mark.parametrize("temperature", [100.0, 1000.0])
def test_high_temperatures(gloo_pool: Callable[[int], Pool], temperature: float, entry: str) -> None:
    """Every rank computes float64 statistics; the exchange keeps them."""
    for divergence in DIVERGENCES:
        case = case_of(2, "empty shard", entry, divergence=divergence, temperature=temperature, terms="kd")
        check(gloo_pool(2).run(run_case, case, entry), case, entry, FP32)


@INTERPRETED
@every_entry
@pytest.mark.parametrize(
    "divergence, temperature, layout",
    [
        ("forward_kl", 1.0, "ragged"),
        ("reverse_kl", 2.0, "empty shard"),
        ("jsd", 0.5, "empty shard"),
        ("tvd", 1.0, "ragged"),
        ("forward_kl", 1000.0, "empty shard"),
    ],
)
def test_triton(gloo_pool: Callable[[int], Pool], divergence: str, temperature: float, layout: str, entry: str) -> None:
    case = case_of(2, layout, entry, divergence=divergence, temperature=temperature, z_loss=1e-2)
    check(gloo_pool(2).run(run_case, case, entry, False, "triton"), case, entry, FP32)


@every_entry
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_repeats_bit_for_bit(gloo_pool: Callable[[int], Pool], divergence: str, entry: str) -> None:
    """Two chunks are in flight at a time; the order of additions does not depend on timing."""
    case = case_of(4, "ragged", entry, divergence=divergence, chunk_rows=2)
    first, second = (gloo_pool(4).run(run_case, case, entry) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for name in ("loss", "ce", "kd"):
            assert torch.equal(getattr(a.output, name), getattr(b.output, name)), name
        for mine, theirs in zip(a.gradients, b.gradients, strict=True):
            assert torch.equal(mine, theirs)
        assert a.forward == b.forward == first[0].forward


def run_impossible_shard(
    rank: int, world_size: int, divergence: str, who: str, temperature: float, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, gradient of this shard, the reference's values, its gradient): one model excludes all of shard 1."""
    student, teacher = torch.randn(2, 3, 10 * world_size, generator=torch.Generator().manual_seed(4))
    (student if who == "student" else teacher)[1, 10:20] = -torch.inf
    spec = LossSpec(divergence=divergence, temperature=temperature)
    full = student.double().requires_grad_()
    values = reference.DIVERGENCES[divergence](full, teacher.double(), spec)
    (truth,) = torch.autograd.grad(values.sum(), full)
    mine = slice(10 * rank, 10 * rank + 10)
    shard = student[:, mine].clone().requires_grad_()
    out = vocab_parallel_loss(
        shard,
        teacher[:, mine].contiguous(),
        torch.zeros(3).long(),
        None,
        torch.ones(3),
        spec=spec,
        true_vocab=10 * world_size,
        tp_group=torch.distributed.group.WORLD,
        impl=impl,
    )
    return out.kd, *torch.autograd.grad(out.loss, shard), values.detach(), truth[:, mine]


@every_divergence
@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("temperature, impl", [(0.5, "eager"), (0.5, "triton")])
def test_shard_without_a_possible_column(
    gloo_pool: Callable[[int], Pool], divergence: str, who: str, temperature: float, impl: str
) -> None:
    if impl == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is on only where there is no GPU")
    for kd, gradient, values, truth in gloo_pool(2).run(run_impossible_shard, divergence, who, temperature, impl):
        finite = values.isfinite()
        assert torch.equal(kd.isfinite(), finite)
        assert_close_norm(kd[finite], values[finite], FP32, "values")
        rows = finite if divergence == "reverse_kl" else torch.ones_like(finite)
        assert_close_norm(gradient[rows], truth[rows], FP32, "gradient")


@every_entry
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
    "terms, temperature, divergence, numbers",
    [
        ("ce", 1.0, "jsd", [3]),
        ("ce", 2.0, "jsd", [3]),
        ("kd", 1.0, "forward_kl", [5]),
        ("ce+kd", 1.0, "reverse_kl", [6]),
        ("ce+kd", 2.0, "forward_kl", [7]),
        ("kd", 2.0, "tvd", [4, 2]),
        ("ce+kd", 2.0, "jsd", [6, 2]),
        ("ce+kd", 2.0, "skew_forward_kl", [6, 2]),
        ("ce+kd", 1.0, "skew_reverse_kl", [5, 2]),
    ],
)
def test_launches_and_bytes(
    gloo_pool: Callable[[int], Pool], terms: str, temperature: float, divergence: str, numbers: list[int]
) -> None:
    """Each pass is one all-gather per chunk, in forward, of at most 32 bytes per token; in backward the hidden states'
    reduction alone."""
    for entry in ENTRIES:
        case = case_of(2, "ragged", entry, terms=terms, temperature=temperature, divergence=divergence)
        chunks = [case.rows] if entry == "logits" else [5, 5, case.rows - 10] if entry == "fused" else [5, 5, 5, 1]
        statistics = [("_allgather_base_", count * 4 * rows) for rows in chunks for count in numbers]
        assert all(count * 4 <= 32 for count in numbers)
        models = [case.student_width] + [case.teacher_width] * ("kd" in terms)
        gathers = [("_allgather_base_", case.rows // 2 * width * 4) for width in models] if entry == "sp" else []
        reduction = {"logits": [], "fused": ["allreduce_"], "sp": ["_reduce_scatter_base_"]}[entry]
        for result in gloo_pool(2).run(run_case, case, entry):
            # two chunks are under way at a time, so their rounds alternate
            assert result.forward[: len(gathers)] == gathers
            assert sorted(result.forward[len(gathers) :]) == sorted(statistics)
            assert [name for name, _ in result.backward] == reduction


def test_one_rank_group_launches_no_collective(gloo_pool: Callable[[int], Pool]) -> None:
    """A group of one rank needs no communication."""
    case = case_of(1, "ragged", "fused", divergence="jsd")
    for result in gloo_pool(1).run(run_case, case, "fused"):
        assert result.forward == result.backward == []
