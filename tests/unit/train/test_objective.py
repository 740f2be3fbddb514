"""The loss of one microbatch and its means against the float64 definition, on one rank. Layouts: tests/dist."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.data.batch import KDBatch
from mkd.losses import LinearLogits, LogitMap, SparseTeacher, reference
from mkd.teacher.interface import EnsembleSignal, HiddenSignal, TopKSignal
from mkd.train import objective as module
from mkd.train.evaluation import measure
from mkd.train.objective import LossContext, MicrobatchObjective, Objective, Student, flatten_tokens
from mkd.train.step_tokens import StepTokens
from tests.support.tolerance import FP32, assert_close_norm

VOCAB, WIDTH, ROWS, LENGTH = 11, 6, 2, 5
RATIO, BALANCE = 0.3, 2.0
ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
SPEC = LossSpec(divergence="jsd", temperature=2.0)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def batch() -> KDBatch:
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    ce_mask, kd_mask = torch.ones(2, ROWS, LENGTH)
    ce_mask[0, :2], kd_mask[1, 3:] = 0.0, 0.0
    return KDBatch(tokens, tokens.roll(-1, 1), ce_mask, kd_mask, tokens)


def objective(batch: KDBatch, **options: object) -> Objective:
    """A step of which the batch has half of the CE tokens and a third of the KD tokens."""
    tokens = StepTokens(2.0 * batch.ce_mask.double().sum(), 3.0 * batch.kd_mask.double().sum())
    return Objective(RATIO, SPEC, tokens, balance=BALANCE, **options)


def signal(seed: int) -> HiddenSignal:
    return HiddenSignal(random(seed, LENGTH, ROWS, WIDTH), random(seed + 1, VOCAB, WIDTH))


def defined(batch: KDBatch, hidden: Tensor, weight: Tensor, teachers: list[tuple[float, HiddenSignal]]) -> Tensor:
    """The step's loss times its divisor, restricted to this microbatch, in float64."""
    logits = hidden.double() @ weight.double().t()
    tokens = objective(batch).tokens
    ce = reference.cross_entropy(logits, flatten_tokens(batch.labels)) * flatten_tokens(batch.ce_mask)
    loss = (1 - RATIO) * ce.sum() / tokens.ce
    for share, one in teachers:
        teacher = one.hidden.flatten(0, 1).double() @ one.head.double().t()
        kd = reference.jsd(logits, teacher, SPEC) * flatten_tokens(batch.kd_mask)
        loss = loss + RATIO * BALANCE * share * kd.sum() / tokens.kd
    return loss * tokens.ce


def computed(
    batch: KDBatch, step: Objective, one: HiddenSignal | EnsembleSignal | None, hidden: Tensor, weight: Tensor
):
    student = Student(hidden, weight, LogitMap(), sequence_parallel=False, upstream=1.0)
    microbatch = MicrobatchObjective.of(LossContext(SimpleNamespace(tp=ONE, cp=ONE), VOCAB), batch, step, one)
    return microbatch, *microbatch.loss(student)


TEACHERS = {"one": [(1.0, signal(3))], "two": [(0.25, signal(3)), (1.5, signal(5))]}


@pytest.mark.parametrize("teachers", TEACHERS.values(), ids=TEACHERS)
def test_loss_and_gradients(batch: KDBatch, teachers: list[tuple[float, HiddenSignal]]) -> None:
    hidden, weight = (random(seed, *shape).requires_grad_() for seed, shape in ((7, (10, WIDTH)), (8, (VOCAB, WIDTH))))
    shares, signals = zip(*teachers, strict=True)
    one = signals[0] if len(signals) == 1 else EnsembleSignal(signals, shares)
    _, loss, means, ce = computed(batch, objective(batch), one, hidden, weight)
    loss.backward()
    expected_hidden, expected_weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    expected = defined(batch, expected_hidden, expected_weight, teachers)
    expected.backward()
    assert_close_norm(loss, expected, FP32, "loss")
    assert_close_norm(hidden.grad, expected_hidden.grad, FP32, "hidden states")
    assert_close_norm(weight.grad, expected_weight.grad, FP32, "LM head")
    assert set(means) == ({"ce", "kd"} if len(signals) == 1 else {"ce", "kd", "kd_1", "kd_2"})
    assert means["ce"].count == batch.ce_mask.sum() and means["ce"].count_of_step == 2 * batch.ce_mask.sum()
    assert_close_norm((ce * batch.ce_mask).sum(), means["ce"].total, FP32, "CE")


def test_the_sum_of_divergences_is_a_mean_over_the_divisor(batch: KDBatch) -> None:
    (a, first), (b, second) = TEACHERS["two"]
    _, _, means, _ = computed(
        batch, objective(batch), EnsembleSignal((first, second), (a, b)), random(7, 10, WIDTH), random(8, VOCAB, WIDTH)
    )
    scale = objective(batch).tokens.kd_scale
    expected = scale * (a * means["kd_1"].total + b * means["kd_2"].total)
    assert_close_norm(means["kd"].total, expected, FP32, "kd")
    assert means["kd"].count == batch.ce_mask.sum()


def test_an_evaluation_reports_the_objective_without_weights_in_its_sums(batch: KDBatch) -> None:
    hidden, weight, one = random(7, 10, WIDTH), random(8, VOCAB, WIDTH), signal(3)
    microbatch, loss, means, _ = computed(batch, objective(batch, evaluating=True), one, hidden, weight)
    expected = defined(batch, hidden, weight, [(1.0, one)])
    assert_close_norm(microbatch.evaluated(means), expected, FP32, "evaluated")
    assert_close_norm(loss, means["ce"].total + means["kd"].total, FP32, "unweighted sum")


def test_without_kd_there_is_ce_only(batch: KDBatch) -> None:
    hidden, weight = random(7, 10, WIDTH), random(8, VOCAB, WIDTH)
    step = Objective(0.0, SPEC, objective(batch).tokens)
    _, loss, means, _ = computed(batch, step, None, hidden, weight)
    assert set(means) == {"ce"}
    assert_close_norm(loss, means["ce"].total, FP32, "loss")


def test_at_ratio_1_ce_is_not_computed(batch: KDBatch) -> None:
    step = Objective(1.0, SPEC, objective(batch).tokens)
    _, _, means, ce = computed(batch, step, signal(3), random(7, 10, WIDTH), random(8, VOCAB, WIDTH))
    assert set(means) == {"kd"} and ce is None


def test_fractional_weights(batch: KDBatch) -> None:
    """The loss of two microbatches is sum(weight * CE) / sum(weight), and likewise for KD, whatever the weights."""
    weights = torch.rand(2, ROWS, LENGTH, generator=torch.Generator().manual_seed(5))
    weights[0, 1, :3], weights[1, 0, 2] = 0.0, 0.0
    batches = [replace(batch, ce_mask=w, kd_mask=0.5 * w) for w in weights]
    tokens = StepTokens(
        ce=weights.double().sum(), kd=0.5 * weights.double().sum(), ce_tokens=(weights != 0).double().sum(),
        kd_tokens=(weights != 0).double().sum(),
    )  # fmt: skip
    hidden, weight, one = random(7, 10, WIDTH), random(8, VOCAB, WIDTH), signal(3)
    teacher = one.hidden.flatten(0, 1).double() @ one.head.double().t()
    logits = hidden.double() @ weight.double().t()
    ce = reference.cross_entropy(logits, flatten_tokens(batch.labels))
    kd = reference.jsd(logits, teacher, SPEC)
    flat = [flatten_tokens(w).double() for w in weights]
    means = [sum((w * values).sum() for w in flat) / sum(w.sum() for w in flat) for values in (ce, kd)]
    expected = (1 - RATIO) * means[0] + RATIO * BALANCE * means[1]
    for evaluating in (False, True):
        step = Objective(RATIO, SPEC, tokens, balance=BALANCE, evaluating=evaluating)
        total, divisor, found = 0.0, 0.0, {"ce": [0.0, 0.0], "kd": [0.0, 0.0]}
        for one_batch in batches:
            microbatch, loss, terms, _ = computed(one_batch, step, one, hidden, weight)
            total = total + (microbatch.evaluated(terms) if evaluating else loss.detach())
            divisor = divisor + step.divisor(one_batch)
            for name, sums in found.items():
                sums[0], sums[1] = sums[0] + terms[name].total, sums[1] + terms[name].count
        assert evaluating or divisor == int(divisor) == (weights != 0).sum()
        assert_close_norm(total / divisor, expected, FP32, f"loss, evaluating {evaluating}")
        for (name, (value, count)), mean in zip(found.items(), means, strict=True):
            assert_close_norm(value / count, mean, FP32, name)


def test_weights_of_0_and_1_have_factors_of_exactly_1(batch: KDBatch) -> None:
    equal = replace(batch, kd_mask=batch.ce_mask)
    counts = [mask.double().sum() for mask in (equal.ce_mask, equal.kd_mask)]
    tokens = StepTokens(*counts, ce_tokens=counts[0], kd_tokens=counts[1])
    assert tokens.ce_scale == 1.0 and tokens.kd_scale == 1.0
    assert objective(batch).divisor(batch) == batch.ce_mask.sum()


@pytest.mark.parametrize(("ce", "kd", "expected"), [(6.0, 3.0, 2.0), (6.0, 0.0, 1.0), (0.0, 3.0, 1.0), (5.0, 5.0, 1.0)])
def test_scale(ce: float, kd: float, expected: float) -> None:
    assert StepTokens(torch.tensor(ce), torch.tensor(kd)).kd_scale == expected


def selected(batch: KDBatch, one: HiddenSignal) -> HiddenSignal:
    """The signal of a teacher that keeps supervised tokens only."""
    return replace(one, hidden=batch.supervised.take(one.hidden.flatten(0, 1)), selected=True)


@pytest.fixture
def few(batch: KDBatch) -> KDBatch:
    """Three tokens without any weight, which enter no loss."""
    kd_mask = batch.kd_mask.clone()
    kd_mask[0, :2], kd_mask[1, :], batch.ce_mask[1, 4] = 0.0, 0.0, 0.0
    return replace(batch, kd_mask=kd_mask).with_supervised()


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("keeps", ["supervised tokens", "all tokens"])
def test_only_supervised_tokens_enter_the_loss(
    few: KDBatch, keeps: str, evaluating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are those of all tokens; NaN elsewhere has no effect, and its gradient is exactly 0."""
    rows: list[tuple[int, int]] = []
    right = module.loss_from_hidden

    def counting(student: LinearLogits, teacher: LinearLogits, *args: object, **options: object) -> object:
        rows.append((len(student.hidden), len(teacher.hidden)))
        return right(student, teacher, *args, **options)

    monkeypatch.setattr(module, "loss_from_hidden", counting)
    outcomes = []
    for batch in (replace(few, supervised=None), few):
        hidden, weight = random(7, 10, WIDTH), random(8, VOCAB, WIDTH).requires_grad_()
        one, unused = signal(3), torch.ones(10, dtype=torch.bool)
        if batch.supervised is not None:
            unused[batch.supervised.index] = False
            hidden[unused], one.hidden.flatten(0, 1)[unused] = torch.nan, torch.nan
            one = selected(batch, one) if keeps == "supervised tokens" else one
        hidden.requires_grad_()
        microbatch, loss, means, ce = computed(batch, objective(batch, evaluating=evaluating), one, hidden, weight)
        loss.backward()
        finite = torch.stack(microbatch.finite_sums())
        outcomes.append([loss, ce, hidden.grad, weight.grad, finite, *(mean.total for mean in means.values())])
    assert rows == [(10, 10), (7, 7)]
    assert not outcomes[1][2][unused].any()
    for seen, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert_close_norm(seen, expected, 1e-6, "supervised tokens against all")


def test_a_microbatch_without_supervised_tokens(batch: KDBatch) -> None:
    nothing = torch.zeros_like(batch.ce_mask)
    empty = replace(batch, ce_mask=nothing, kd_mask=nothing).with_supervised()
    hidden, weight = random(7, 10, WIDTH).requires_grad_(), random(8, VOCAB, WIDTH).requires_grad_()
    _, loss, means, ce = computed(empty, objective(batch), selected(empty, signal(3)), hidden, weight)
    loss.backward()
    assert not loss and not ce.any() and not means["kd"].total
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("tail_lse", [None, torch.zeros(ROWS, LENGTH)])
def test_cached_targets_of_supervised_tokens(few: KDBatch, tail_lse: Tensor | None) -> None:
    ids = torch.arange(3).expand(ROWS, LENGTH, 3)
    targets = SparseTeacher(ids, random(4, ROWS, LENGTH, 3), torch.full((ROWS, LENGTH), 4.0), tail_lse, temperature=2.0)
    losses = []
    for batch in (replace(few, supervised=None), few):
        hidden, weight = random(7, 10, WIDTH).requires_grad_(), random(8, VOCAB, WIDTH)
        _, loss, _, _ = computed(batch, objective(batch), TopKSignal(targets), hidden, weight)
        loss.backward()
        losses.append((loss, hidden.grad))
    for seen, expected in zip(losses[1], losses[0], strict=True):
        assert_close_norm(seen, expected, 1e-6, "supervised tokens against all")


def test_comparison_of_supervised_tokens(few: KDBatch) -> None:
    means = []
    for batch in (replace(few, supervised=None), few):
        student = Student(random(7, 10, WIDTH), random(8, VOCAB, WIDTH), LogitMap(), False, 1.0)
        context = LossContext(SimpleNamespace(tp=ONE, cp=ONE), VOCAB)
        one = signal(3) if batch.supervised is None else selected(batch, signal(3))
        microbatch = MicrobatchObjective.of(context, batch, objective(batch, evaluating=True), one)
        found, calibration = measure(microbatch, student, torch.zeros(ROWS, LENGTH))
        means.append([calibration, *(torch.stack([mean.total, mean.count]) for mean in found.values())])
    for seen, expected in zip(means[1], means[0], strict=True):
        assert_close_norm(seen, expected, 1e-6, "supervised tokens against all")
