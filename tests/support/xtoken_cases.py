"""Microbatches of two tokenizers, and their losses by the float64 definitions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.data.batch import chunk_starts
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.losses import LossOutput, reference
from mkd.losses.inputs import PLAIN_LOGITS, LogitMaps
from mkd.xtoken.loss import reference as definitions
from mkd.xtoken.loss.chunks import TokenChunks
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary, relaxed_pairs
from tests.support.loss_cases import UPSTREAM
from tests.support.tolerance import assert_close_norm

KINDS = ["partition_kl", "p_kl", "gold", "gold_relaxed"]


@dataclass(frozen=True)
class XTokenCase:
    """One microbatch of two sequences, with chunks of 1 to 4 tokens in each view."""

    kind: str = "partition_kl"
    divergence: str = "forward_kl"
    temperature: float = 1.0
    temperature_squared: bool = True
    z_loss: float = 0.0
    dtype: torch.dtype = torch.float32
    length: int = 32
    """Tokens of each sequence, in both views; both end in padding."""
    student_vocab: int = 29
    teacher_vocab: int = 37
    common: int = 15
    width: int = 32
    """Rows of the student's LM head over all ranks, padding included."""
    with_ce: bool = True
    masked: str = ""
    """"chunks": no chunk counts; "all": nor does any row in cross-entropy; "rank": the second of two context-parallel
    ranks has nothing that counts."""
    uncommon_top_k: int = 9
    chunk_rows: int | None = 11
    maps: LogitMaps = PLAIN_LOGITS

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
            divergence=self.divergence,
            beta=0.3,
            skew=0.2,
            temperature=self.temperature,
            temperature_squared=self.temperature_squared,
            z_loss=self.z_loss,
        )


class Microbatch(NamedTuple):
    """Unsharded; rows are [b, s] tokens in sequence-first order, [s * b]. What must not matter is NaN or illegal."""

    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    """[V_t, Ht] in the order of ids."""
    labels: Tensor
    ce_weight: Tensor | None
    chunks: TokenChunks
    ids: Tensor
    weights: Tensor
    pairs: Tensor

    @property
    def teacher_labels(self) -> Tensor:
        return self.chunks.teacher_labels

    def vocabulary(self, case: XTokenCase, rank: int = 0, size: int = 1) -> CrossVocabulary:
        return CrossVocabulary.of(
            case.kind,
            self.ids,
            self.weights,
            self.pairs,
            student_vocab=case.student_vocab,
            teacher_vocab=case.teacher_vocab,
            student_width=len(self.student_weight) // size,
            rank=rank,
            size=size,
        )


class Expected(NamedTuple):
    """Results of the definitions; gradients are those of UPSTREAM * loss."""

    loss: Tensor
    ce: Tensor | None
    kd: Tensor
    d_hidden: Tensor
    d_weight: Tensor


SEQUENCES = 2


def make(case: XTokenCase) -> Microbatch:
    """The same numbers in every process."""
    gen = torch.Generator().manual_seed(99)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(case.dtype)

    n = SEQUENCES * case.length
    hidden, weight, teacher_hidden, teacher_weight = (
        normal(n, 7),
        normal(case.width, 7),
        normal(n, 10),
        normal(case.teacher_vocab, 10),
    )
    weight[case.student_vocab :] = torch.nan
    student, teacher, count = _chunk_numbers(case.length, gen)
    labels = torch.randint(0, case.student_vocab, (n,), generator=gen)
    teacher_labels = torch.randint(0, case.teacher_vocab, (n,), generator=gen)
    ce_weight = torch.rand(n, generator=gen) + 0.1
    kd_weight = torch.rand(count, generator=gen) + 0.1
    kd_weight[1] = kd_weight[count - 2] = 0
    if case.masked in ("chunks", "all"):
        kd_weight.zero_()
    numbers = (_rows(x) for x in (student, chunk_starts(student), teacher, chunk_starts(teacher)))
    chunks = TokenChunks(*numbers, teacher_labels, kd_weight)
    ce_weight[::5] = 0
    if case.masked == "all":
        ce_weight.zero_()
    if case.masked == "rank":
        away = rows_of_rank(case, 1, 2)
        ce_weight[away] = 0
        kd_weight[chunks.student[away][chunks.student[away] >= 0]] = 0
    used = _counting(chunks.student, kd_weight)
    unused = ~used & (ce_weight == 0 if case.with_ce else torch.tensor(True))
    hidden[unused], labels[unused] = torch.nan, -100
    unread = ~_counting(chunks.teacher, kd_weight)
    teacher_hidden[unread], teacher_labels[unread] = torch.inf, -100
    _make_common(chunks, labels, teacher_labels, case)
    ids, weights, pairs = _projection(case, gen)
    rest = (labels, ce_weight if case.with_ce else None, chunks, ids, weights, pairs)
    return Microbatch(hidden, weight, teacher_hidden, teacher_weight, *rest)


def _chunk_numbers(length: int, gen: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Chunk numbers of both views [b, s], and their count. Some tokens of each view are in no chunk."""
    student, teacher = torch.full((2, SEQUENCES, length), -1)
    count = 0
    for row in range(SEQUENCES):
        places = [row, 1]
        while True:
            sizes = [1, 1]
            if torch.rand((), generator=gen) < 0.5:
                sizes = torch.randint(1, 5, (2,), generator=gen).tolist()
            if max(a + b for a, b in zip(places, sizes, strict=True)) > length - 2:
                break
            for side, numbers in enumerate((student, teacher)):
                numbers[row, places[side] : places[side] + sizes[side]] = count
                places[side] += sizes[side]
            count += 1
            if torch.rand((), generator=gen) < 0.2:
                places[int(torch.randint(0, 2, (), generator=gen))] += 1
    return student, teacher, count


def _rows(tokens: Tensor) -> Tensor:
    """[b, s] -> [s * b]"""
    return tokens.t().reshape(-1)


def _counting(chunk: Tensor, weight: Tensor) -> Tensor:
    return (chunk >= 0) & (weight[chunk] != 0)


def _make_common(chunks: TokenChunks, labels: Tensor, teacher_labels: Tensor, case: XTokenCase) -> None:
    """Half of the chunks begin with tokens of one pair, as most chunks of one token do."""
    for chunk in range(0, len(chunks.weight), 2):
        s = ((chunks.student == chunk) & chunks.student_first).nonzero()[0, 0]
        t = ((chunks.teacher == chunk) & chunks.teacher_first).nonzero()[0, 0]
        if labels[s] >= 0 and teacher_labels[t] >= 0:
            labels[s], teacher_labels[t] = _pairs(case)[chunk % case.common]


def _pairs(case: XTokenCase) -> Tensor:
    gen = torch.Generator().manual_seed(5)
    sides = [torch.randperm(v, generator=gen)[: case.common] for v in (case.student_vocab, case.teacher_vocab)]
    return torch.stack(sides, dim=1)


def _projection(case: XTokenCase, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, weights, pairs): common tokens are written in themselves, others in 0 to 3 tokens."""
    pairs = _pairs(case)
    ids = torch.randint(0, case.teacher_vocab - 3, (case.student_vocab, 3), generator=gen)
    ids[ids[:, 0] == ids[:, 1], 1] = -1
    ids[(ids[:, 0] == ids[:, 2]) | (ids[:, 1] == ids[:, 2]), 2] = -1
    weights = torch.tensor([0.9, 0.08, 0.02]).repeat(case.student_vocab, 1)
    weights[::4] = torch.tensor([0.5, 0.3, 0.2])
    ids[::7] = -1
    ids[pairs[:, 0]] = torch.stack([pairs[:, 1]] + [torch.full_like(pairs[:, 1], -1)] * 2, dim=1)
    weights[pairs[:, 0]] = torch.tensor([1.0, 0.0, 0.0])
    return ids, weights, pairs


def matrix(case: XTokenCase, x: Microbatch) -> Tensor:
    """[V_s, V_t] float64, rows normalized, rounded to fp32 as the projection is."""
    dense = torch.zeros(case.student_vocab, case.teacher_vocab, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(x.ids, x.weights.double(), strict=True)):
        keep = (ids >= 0) & (weights > 0)
        dense[row, ids[keep]] = (weights[keep] / weights[keep].sum()).float().double()
    return dense


def definition(case: XTokenCase, x: Microbatch) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The definition for one chunk, a function of its logits and labels."""
    pairs = relaxed_pairs(x.ids, x.weights) if case.kind == "gold_relaxed" else x.pairs
    projection = matrix(case, x) if case.kind == "p_kl" else None

    def value(z: Tensor, u: Tensor, labels: Tensor, teacher_labels: Tensor) -> Tensor:
        if case.kind == "p_kl":
            return definitions.p_kl(z, u, projection, case.spec)
        if case.kind == "partition_kl":
            return definitions.partition_kl(z, u, labels, teacher_labels, pairs, case.spec)
        return definitions.gold(z, u, pairs, case.spec, case.uncommon_top_k)

    return value


@cache
def expect(case: XTokenCase) -> Expected:
    """The definitions in float64, a chunk at a time, through autograd."""
    x = make(case)
    hidden = x.student_hidden.double().nan_to_num(0).requires_grad_()
    weight = x.student_weight[: case.student_vocab].double().requires_grad_()
    z = case.maps.student.scale * (hidden @ weight.t())
    if case.maps.student.softcap is not None:
        z = case.maps.student.softcap * torch.tanh(z / case.maps.student.softcap)
    u = case.maps.teacher.apply_(x.teacher_hidden.double().nan_to_num(0, 0, 0) @ x.teacher_weight.double().t())
    kd, divergence = [], definition(case, x)
    for chunk, used in enumerate(x.chunks.weight != 0):
        s, t = ((side == chunk).nonzero()[:, 0] for side in (x.chunks.student, x.chunks.teacher))
        value = z.new_zeros(())
        if used:
            value = divergence(z[s], u[t], x.labels[s], x.teacher_labels[t])
        kd.append(value)
    loss, ce = (x.chunks.weight * torch.stack(kd)).sum() + 0.0 * z.sum(), None
    if x.ce_weight is not None:
        used = x.ce_weight != 0
        ce = torch.where(used, reference.cross_entropy(z, torch.where(used, x.labels, 0)), 0)
        loss = loss + (x.ce_weight * (ce + case.z_loss * reference.z_loss(z))).sum()
        ce = ce.detach()
    d_hidden, d_weight = torch.autograd.grad(UPSTREAM * loss, (hidden, weight))
    d_weight = torch.nn.functional.pad(d_weight, (0, 0, 0, case.width - case.student_vocab))
    return Expected(loss.detach(), ce, torch.stack(kd).detach(), d_hidden, d_weight)


def rows_of_rank(case: XTokenCase, rank: int, size: int) -> Tensor:
    """[s/cp * b] rows of the whole microbatch that a context-parallel rank has: each sequence in two segments."""
    places = dual_chunk_positions([0, 8, case.length], rank, size)
    return (places[:, None] * SEQUENCES + torch.arange(SEQUENCES)).reshape(-1)


def check_values(out: LossOutput, expected: Expected, tol: float) -> None:
    assert_close_norm(out.loss, expected.loss, tol, "loss")
    assert_close_norm(out.kd, expected.kd, tol, "kd")
    assert (out.ce is None) == (expected.ce is None)
    if out.ce is not None:
        assert_close_norm(out.ce, expected.ce, tol, "ce")
