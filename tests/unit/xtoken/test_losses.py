"""Losses between tokenizers on one rank against their float64 definitions."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mkd.errors import MkdConfigError
from mkd.losses import LinearLogits, LossOptions, LossOutput, TokenWeights, VocabLayout, fused_linear_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import LogitMap, LogitMaps
from mkd.xtoken.loss.chunks import TokenChunks
from mkd.xtoken.loss.xtoken_loss import xtoken_loss
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary, relaxed_pairs
from tests.support.loss_cases import INTERPRETED, UPSTREAM
from tests.support.poison import poisoned_memory
from tests.support.tolerance import FP32, FP64, assert_close_norm
from tests.support.xtoken_cases import KINDS, Microbatch, XTokenCase, check_values, expect, make


def run(
    case: XTokenCase, x: Microbatch | None = None, vocabulary: CrossVocabulary | None = None, impl: str = "eager"
) -> tuple[LossOutput, Tensor, Tensor]:
    """(output, d_hidden, d_weight), of the case's own inputs or of others."""
    x = make(case) if x is None else x
    vocabulary = x.vocabulary(case) if vocabulary is None else vocabulary
    leaves = [t.clone().requires_grad_() for t in (x.student_hidden, x.student_weight)]
    with poisoned_memory():
        out = xtoken_loss(
            LinearLogits(*leaves, case.maps.student),
            LinearLogits(x.teacher_hidden, x.teacher_weight[vocabulary.teacher_columns], case.maps.teacher),
            TokenWeights(x.labels, x.ce_weight, None),
            x.chunks,
            vocabulary=vocabulary,
            spec=case.spec,
            vocab=VocabLayout(case.student_vocab),
            options=LossOptions(chunk_rows=case.chunk_rows, impl=impl),
            uncommon_top_k=case.uncommon_top_k,
        )
        return out, *torch.autograd.grad(UPSTREAM * out.loss, leaves)


def check(case: XTokenCase, tol: float, impl: str = "eager") -> None:
    out, d_hidden, d_weight = run(case, impl=impl)
    expected = expect(case)
    check_values(out, expected, tol)
    assert_close_norm(d_hidden, expected.d_hidden, tol, "d_hidden")
    assert_close_norm(d_weight, expected.d_weight, tol, "d_weight")
    assert not d_weight[case.student_vocab :].any()
    assert not d_hidden[make(case).student_hidden.isnan()].any()


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence(kind: str, divergence: str) -> None:
    check(XTokenCase(kind, divergence, temperature=2.0, z_loss=1e-2), FP32)


@every_kind
@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
@pytest.mark.parametrize("temperature, squared", [(1.0, True), (0.7, False)])
def test_temperatures(kind: str, divergence: str, temperature: float, squared: bool) -> None:
    check(XTokenCase(kind, divergence, temperature, squared, z_loss=1e-2, dtype=torch.float64), FP64)


@every_kind
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "tvd"])
@pytest.mark.parametrize("temperature", [100.0, 1000.0])
def test_high_temperatures(kind: str, divergence: str, temperature: float) -> None:
    for with_ce in (True, False):
        check(XTokenCase(kind, divergence, temperature, with_ce=with_ce), FP32)


@INTERPRETED
@pytest.mark.parametrize(
    "kind, divergence, temperature",
    [
        ("partition_kl", "forward_kl", 1.0),
        ("partition_kl", "jsd", 2.0),
        ("partition_kl", "forward_kl", 100.0),
        ("p_kl", "jsd", 2.0),
        ("gold", "jsd", 2.0),
        *(pytest.param(kind, "forward_kl", 1.0, marks=pytest.mark.slow) for kind in ("p_kl", "gold")),
        ("p_kl", "forward_kl", 100.0),
        ("gold", "forward_kl", 100.0),
    ],
)
def test_triton(kind: str, divergence: str, temperature: float) -> None:
    check(XTokenCase(kind, divergence, temperature, z_loss=1e-2, length=12), FP32, "triton")


MAPPED = {"maps": LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0)), "temperature": 2.0, "divergence": "reverse_kl"}
ALL_COMMON = {"common": 29, "student_vocab": 31, "teacher_vocab": 29, "with_ce": False, "chunk_rows": None}


@INTERPRETED
@pytest.mark.parametrize(
    "kind, changes",
    [
        ("p_kl", MAPPED),
        pytest.param("gold", MAPPED, marks=pytest.mark.slow),
        pytest.param("p_kl", ALL_COMMON, marks=pytest.mark.slow),
        ("gold", ALL_COMMON),
        ("p_kl", {"masked": "chunks"}),
        ("gold", {"masked": "chunks"}),
    ],
    ids=str,
)
def test_triton_changes(kind: str, changes: dict) -> None:
    check(XTokenCase(kind, length=8, **changes), FP32, "triton")


@every_kind
@pytest.mark.parametrize(
    "changes",
    [
        {"with_ce": False},
        {"chunk_rows": 1},
        {"chunk_rows": None, "temperature": 2.0},
        {"masked": "chunks"},
        {"masked": "all"},
        {"maps": LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0)), "temperature": 2.0},
        {"uncommon_top_k": 1},
        {"common": 29, "teacher_vocab": 29, "divergence": "reverse_kl"},
        {"common": 29, "divergence": "forward_kl"},
        {"common": 29, "student_vocab": 31, "teacher_vocab": 29, "divergence": "jsd"},
        {"common": 5, "length": 8},
    ],
    ids=str,
)
def test_changes(kind: str, changes: dict) -> None:
    """Terms, groups, masks, logit maps; vocabularies of which one or both have nothing of their own."""
    check(XTokenCase(kind, **changes), FP32)


def same_tokenizer(case: XTokenCase) -> Microbatch:
    """The case with chunks of one token, one tokenizer and the identity between its ids."""
    x = make(case)
    chunk = torch.arange(len(x.labels))
    weight = torch.rand(len(chunk), generator=torch.Generator().manual_seed(3))
    weight[::3] = 0
    every = torch.ones_like(chunk, dtype=torch.bool)
    ids = torch.arange(case.student_vocab)
    labels = torch.randint(0, case.student_vocab, chunk.shape, generator=torch.Generator().manual_seed(4))
    return x._replace(
        student_hidden=x.student_hidden.nan_to_num(0.5),
        teacher_hidden=x.teacher_hidden.nan_to_num(0.5, 0.5),
        labels=labels,
        chunks=TokenChunks(chunk, every, chunk, every, labels, weight),
        ids=ids[:, None],
        weights=torch.ones(case.student_vocab, 1),
        pairs=torch.stack([ids, ids], dim=1),
    )


@every_kind
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_one_tokenizer_is_the_plain_divergence(kind: str, divergence: str) -> None:
    case = XTokenCase(kind, divergence, temperature=2.0, z_loss=1e-2, teacher_vocab=29)
    x = same_tokenizer(case)
    out, d_hidden, d_weight = run(case, x)
    leaves = [x.student_hidden.detach().requires_grad_(), x.student_weight.detach().requires_grad_()]
    teacher = torch.nn.functional.pad(x.teacher_weight, (0, 0, 0, 3))
    rows = (x.labels, x.ce_weight, x.chunks.weight)
    plain = fused_linear_loss(*leaves, x.teacher_hidden, teacher, *rows, spec=case.spec, true_vocab=29)
    gradients = torch.autograd.grad(UPSTREAM * plain.loss, leaves)
    for name, actual, wanted in (
        ("loss", out.loss, plain.loss),
        ("ce", out.ce, plain.ce),
        ("kd", out.kd, plain.kd),
        ("d_hidden", d_hidden, gradients[0]),
        ("d_weight", d_weight, gradients[1]),
    ):
        assert_close_norm(actual, wanted, FP32, name)


@every_kind
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_teacher_equal_to_student(kind: str, divergence: str) -> None:
    """0 and a gradient of 0, also of chunks of several tokens and where only a part of the vocabulary is in pairs.

    Not of tvd, nor of gold's sorted probabilities, for which all tokens are in pairs: there rounding decides a sign.
    """
    case = XTokenCase(kind, divergence, temperature=2.0, teacher_vocab=29, with_ce=False, dtype=torch.float64)
    x = same_tokenizer(case)
    chunk, weight = torch.arange(len(x.labels)) // 3, x.chunks.weight[: len(x.labels) // 3 + 1]
    first = torch.arange(len(x.labels)) % 3 == 0
    some = x.pairs[::2] if kind == "partition_kl" else x.pairs
    x = x._replace(
        teacher_hidden=x.student_hidden,
        teacher_weight=x.student_weight[:29],
        chunks=TokenChunks(chunk, first, chunk, first, x.teacher_labels, weight),
        pairs=some,
        ids=torch.where(torch.isin(x.ids, x.pairs[::2, 0]), x.ids, -1) if kind == "p_kl" else x.ids,
    )
    out, d_hidden, d_weight = run(case, x)
    scale = x.chunks.weight.sum().item()
    assert out.kd.abs().max() < FP64 and (x.chunks.weight != 0).any()
    if divergence != "tvd":
        assert d_hidden.abs().max() < FP64 * scale and d_weight.abs().max() < FP64 * scale


def replaced(x: Microbatch, **changes: Tensor) -> Microbatch:
    return x._replace(chunks=dataclasses.replace(x.chunks, **changes))


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_invalid_chunks(side: str) -> None:
    case = XTokenCase()
    x = make(case)
    chunk, first = getattr(x.chunks, side), getattr(x.chunks, f"{side}_first")
    name = f"{side}_first"
    with pytest.raises(ValueError, match=f"{side} tokens and 0 first ones"):
        run(case, replaced(x, **{name: torch.zeros_like(first)}))
    with pytest.raises(ValueError, match="chunk 0 has a weight, 0 "):
        run(case, replaced(x, **{side: torch.where(chunk == 0, -1, chunk)}))
    with pytest.raises(ValueError, match="token is in chunk"):
        run(case, replaced(x, weight=x.chunks.weight[:-1]))
    wrong = (x.labels if side == "student" else x.teacher_labels).clone()
    wrong[(chunk == 0).nonzero()[0, 0]] = 40
    with pytest.raises(ValueError, match=f"{side} label 40"):
        run(case, x._replace(labels=wrong) if side == "student" else replaced(x, teacher_labels=wrong))
    with pytest.raises(ValueError, match="has shape"):
        run(case, replaced(x, **{name: first[1:]}))


def test_invalid_inputs() -> None:
    case = XTokenCase()
    x = make(case)
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        run(dataclasses.replace(case, chunk_rows=0))
    with pytest.raises(ValueError, match="uncommon_top_k is 0"):
        run(XTokenCase("gold", uncommon_top_k=0))
    with pytest.raises(ValueError, match="true_vocab is 28, the vocabulary has 29 tokens"):
        run(dataclasses.replace(case, student_vocab=28), x, x.vocabulary(case))
    with pytest.raises(ValueError, match="32 student columns; this is rank 0 of 1 with 31"):
        run(case, x._replace(student_weight=x.student_weight[:31]), x.vocabulary(case))
    with pytest.raises(MkdConfigError, match="no token in common"):
        x._replace(pairs=x.pairs[:0]).vocabulary(case)
    with pytest.raises(MkdConfigError, match=r"student token .* is in several pairs"):
        x._replace(pairs=x.pairs[[0, 0]]).vocabulary(case)


@pytest.mark.parametrize("kind", ["partition_kl", "gold"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_shards(kind: str, size: int) -> None:
    case = XTokenCase(kind)
    x = make(case)
    parts = [x.vocabulary(case, rank, size) for rank in range(size)]
    columns = torch.cat([part.teacher_columns for part in parts])
    assert torch.equal(columns.sort().values, torch.arange(case.teacher_vocab))
    for rank, part in enumerate(parts):
        slots = len(part.slots)
        start = rank * (case.width // size)
        pairs = torch.stack([part.slots + start, part.teacher_columns[:slots]], dim=1)
        assert all(pair in x.pairs.tolist() for pair in pairs.tolist())
        assert slots + len(part.uncommon) == max(0, min(case.width // size, case.student_vocab - start))
        assert torch.equal(part.teacher_columns, columns[part.teacher_starts[rank] : part.teacher_starts[rank + 1]])
    assert sum(len(part.slots) for part in parts) == case.common
    widths = [len(part.teacher_columns) for part in parts]
    assert max(widths) <= max(-(-case.teacher_vocab // size), *(len(part.slots) for part in parts), 0)


def test_relaxed_pairs() -> None:
    """At least 0.6 of the projection; of several student tokens the one with most weight, then the lowest id."""
    ids = torch.tensor([[5, 6], [5, 7], [8, 9], [9, 1], [9, 2], [3, -1]])
    weights = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.59, 0.41], [0.8, 0.2], [0.8, 0.2], [1.0, 0.0]])
    assert relaxed_pairs(ids, weights).tolist() == [[5, 3], [1, 5], [3, 9]]
