"""Tokens sampled from the teacher: intervals, counts, and the gradient of the loss."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses import LinearLogits, LogitMap, SparseTeacher, VocabLayout, reference, topk_loss
from mkd.losses.measure.sampling import label_logits, sample_teacher_tokens
from mkd.teacher.cache.sampling import count_ids, stratified_uniforms
from tests.support.tolerance import FP32, assert_close_norm

VOCAB, DRAWS = 23, 5


def make(rows: int, seed: int = 0, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Hidden states and LM head, with padding rows that must have no effect."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(rows, 8, generator=generator)
    weight = torch.randn(vocab, 8, generator=generator)
    return hidden, torch.cat((weight, torch.full((9, 8), 50.0)))


def inverse(logits: Tensor, numbers: Tensor, temperature: float) -> Tensor:
    """The definition: the first id whose cumulative probability is above the number."""
    ends = torch.softmax(logits.double() / temperature, dim=1).cumsum(1)
    return (numbers[:, :, None] >= ends[:, None]).sum(2).clamp_max(logits.shape[1] - 1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_samples_follow_the_inverse_distribution(temperature: float) -> None:
    hidden, weight = make(40)
    numbers = stratified_uniforms(b"k" * 16, 40, DRAWS)
    model, how = LinearLogits(hidden, weight), dict(temperatures=(1.0, 2.5), vocab=VocabLayout(VOCAB), chunk_rows=7)
    found = sample_teacher_tokens(model, numbers, temperature, **how)
    logits = hidden @ weight[:VOCAB].t()
    assert torch.equal(found.ids.long(), inverse(logits, numbers, temperature))
    for lse, t in zip(found.lse, (1.0, 2.5), strict=True):
        assert_close_norm(lse, torch.logsumexp(logits.double() / t, 1), FP32, "lse")


def test_logit_map() -> None:
    hidden, weight = make(10)
    capped = LogitMap(scale=0.5, softcap=2.0)
    numbers = stratified_uniforms(b"k" * 16, 10, DRAWS)
    found = sample_teacher_tokens(
        LinearLogits(hidden, weight, capped), numbers, 1.0, temperatures=(1.0,), vocab=VocabLayout(VOCAB)
    )
    assert torch.equal(found.ids.long(), inverse(capped.apply_(hidden @ weight[:VOCAB].t()), numbers, 1.0))


def test_label_logits() -> None:
    hidden, weight = make(10)
    labels = torch.tensor([0, 5, 22, 3, -100, 7, 1, 2, 23, 9])
    found = label_logits(LinearLogits(hidden, weight), labels, vocab=VocabLayout(VOCAB))
    logits = hidden.double() @ weight[:VOCAB].double().t()
    is_id = (labels >= 0) & (labels < VOCAB)
    expected = torch.where(is_id, logits.gather(1, torch.where(is_id, labels, 0)[:, None])[:, 0], 0)
    assert_close_norm(found, expected, FP32, "label")


def test_uniforms_depend_on_key_and_position_only() -> None:
    numbers = stratified_uniforms(b"0123456789abcdef", 7, 4)
    assert torch.equal(numbers[:3], stratified_uniforms(b"0123456789abcdef", 3, 4))
    assert not torch.equal(numbers, stratified_uniforms(b"0123456789abcdeg", 7, 4))
    assert torch.equal((numbers * 4).floor(), torch.arange(4.0).expand(7, 4).double())
    assert numbers[0, 0].item() == pytest.approx(FIRST_NUMBER, abs=0)


FIRST_NUMBER = 0.22110490659104984
"""Caches that exist depend on it."""


def test_counts() -> None:
    ids = np.array([[3, 3, 3, 9], [0, 0, 1, 1], [4, 5, 6, 7], [2, 2, 2, 2]])
    distinct, counts = count_ids(ids, 4)
    for given, row, times in zip(ids, distinct, counts, strict=True):
        assert len(set(row.tolist())) == 4 and row.min() >= 0
        expected = {int(i): int(n) for i, n in zip(*np.unique(given, return_counts=True), strict=True)}
        assert {i: n for i, n in zip(row.tolist(), times.tolist(), strict=True) if n} == expected


@pytest.mark.parametrize(("vocab", "draws"), [(7, 40), (7, 7), (83, 4000), (1, 3)])
def test_more_samples_than_tokens(vocab: int, draws: int) -> None:
    """A record has no more ids than the vocabulary; no sample is lost."""
    ids = np.sort(np.random.RandomState(0).randint(0, vocab, (5, draws)), axis=1)
    ids[0] = vocab - 1
    distinct, counts = count_ids(ids, vocab)
    assert distinct.shape == (5, vocab) and (np.sort(distinct, axis=1) == np.arange(vocab)).all()
    for given, row, times in zip(ids, distinct, counts, strict=True):
        assert (np.bincount(given, minlength=vocab)[row] == times).all()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_mean_gradient_is_that_of_the_full_divergence(temperature: float) -> None:
    """Over many keys. The error of a mean falls with the square root of their number, a bias does not."""
    trials, rows, draws = 4000, 3, 4
    generator = torch.Generator().manual_seed(1)
    hidden, weight = make(rows, seed=2)
    hidden /= 4  # no id so rare that it is never drawn
    teacher = hidden @ weight[:VOCAB].t()
    student = torch.randn(rows, VOCAB, generator=generator).requires_grad_()
    spec = LossSpec(temperature=temperature)
    (full,) = torch.autograd.grad(reference.forward_kl(student.double(), teacher.double(), spec).sum(), student)
    numbers = torch.cat([stratified_uniforms(n.to_bytes(16, "little"), rows, draws) for n in range(trials)])
    many = hidden.repeat(trials, 1)
    found = sample_teacher_tokens(
        LinearLogits(many, weight), numbers, temperature, temperatures=(temperature,), vocab=VocabLayout(VOCAB)
    )
    ids, counts = (torch.from_numpy(x) for x in count_ids(found.ids.numpy(), draws))
    logits = (many @ weight[:VOCAB].t()).gather(1, ids.long())
    sparse = SparseTeacher(ids, logits, found.lse[0], None, temperature, counts)
    whole = student.detach().repeat(trials, 1).requires_grad_()
    loss = topk_loss(
        whole, sparse.ids, sparse.logits, sparse.lse, torch.zeros(len(whole), dtype=torch.long), None,
        torch.ones(len(whole)), spec=spec, tail="bucket", true_vocab=VOCAB, lse_temperature=temperature, counts=counts,
    ).loss  # fmt: skip
    (each,) = torch.autograd.grad(loss, whole)
    each = each.view(trials, rows, VOCAB).double()
    error = (each.mean(0) - full).abs()
    deviation = each.std(0) / trials**0.5
    assert (error <= 5 * deviation).all(), (error / deviation).max()
    assert torch.linalg.vector_norm(deviation) < 0.06 * torch.linalg.vector_norm(full)
