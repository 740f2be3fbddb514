"""Benchmarks from hidden states: inputs, objectives, and reference gradients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses import LossSpec, reference

LOGIT_SPREAD = 2.0
"""Standard deviation of the logits."""


@dataclass(frozen=True)
class Objective:
    """The mean over tokens of ce * CE + kd * divergence."""

    ce: float
    kd: float
    spec: LossSpec

    def __str__(self) -> str:
        return " + ".join([*["CE"] * (self.ce > 0), *[self.spec.divergence] * (self.kd > 0)])


CE_ONLY = Objective(1.0, 0.0, LossSpec())


def with_ce(divergence: str) -> Objective:
    """Half CE, half a divergence."""
    return Objective(0.5, 0.5, LossSpec(divergence=divergence))


def kd_only(divergence: str) -> Objective:
    """A divergence alone."""
    return Objective(0.0, 1.0, LossSpec(divergence=divergence))


@dataclass(frozen=True)
class Inputs:
    """Hidden states [N, H] of both models and this rank's vocabulary shards [V/tp, H] of their LM heads; every token is
    supervised."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor
    """[N] int64"""
    group: dist.ProcessGroup

    @classmethod
    def random(
        cls,
        rows: int,
        widths: tuple[int, int],
        vocab: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        teacher_gap: float | None,
    ) -> "Inputs":
        """Random inputs, equal on all ranks, whose generators must have the same state.

        Args:
            rows: N.
            widths: (Hs, Ht).
            vocab: V; a multiple of the number of ranks.
            dtype: dtype of hidden states and weights.
            group: tensor-parallel ranks.
            teacher_gap: None makes the models independent. Otherwise the teacher's logits are the student's plus noise
                of this standard deviation, and Ht must be above Hs.
        """
        width, teacher_width = widths
        hidden = torch.randn(rows, width, device="cuda")
        weight = torch.randn(vocab, width, device="cuda") * (LOGIT_SPREAD / width**0.5)
        if teacher_gap is None:
            teacher_hidden = torch.randn(rows, teacher_width, device="cuda")
            teacher_weight = torch.randn(vocab, teacher_width, device="cuda") * (LOGIT_SPREAD / teacher_width**0.5)
        else:
            rest = teacher_width - width
            noise = torch.randn(vocab, rest, device="cuda") * (teacher_gap / rest**0.5)
            teacher_hidden = torch.cat([hidden, torch.randn(rows, rest, device="cuda")], dim=1)
            teacher_weight = torch.cat([weight, noise], dim=1)
        mine = slice(vocab // group.size() * group.rank(), vocab // group.size() * (group.rank() + 1))
        labels = torch.randint(0, vocab, (rows,), device="cuda")
        heads = (w[mine].to(dtype) for w in (weight, teacher_weight))
        weight, teacher_weight = heads
        hidden, teacher_hidden = hidden.to(dtype), teacher_hidden.to(dtype)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight, labels, group)

    def only(self, tokens: Tensor) -> "Inputs":
        """Some of the tokens ([M] int64), as new inputs."""
        hidden = self.hidden.detach()[tokens].requires_grad_()
        return replace(self, hidden=hidden, teacher_hidden=self.teacher_hidden[tokens], labels=self.labels[tokens])

    @property
    def vocab(self) -> int:
        return self.weight.shape[0] * self.group.size()

    def elements(self) -> int:
        """Number of logits of one model on this rank."""
        return self.hidden.shape[0] * self.weight.shape[0]

    def flop(self, with_teacher: bool) -> int:
        """Operations of the matrix products: student's logits, both gradients of the student, teacher's logits."""
        widths = 3 * self.hidden.shape[1] + (self.teacher_hidden.shape[1] if with_teacher else 0)
        return 2 * self.elements() * widths

    def whole(self, shard: Tensor) -> Tensor:
        """[V, H] from each rank's [V/tp, H]. Collective."""
        if self.group.size() == 1:
            return shard.detach()
        whole = shard.new_empty((self.vocab, shard.shape[1]))
        dist.all_gather_into_tensor(whole, shard.detach(), group=self.group)
        return whole


class Gradients(NamedTuple):
    """Results of one forward and backward pass."""

    loss: Tensor
    """Scalar."""
    d_hidden: Tensor
    """[N, Hs], summed over the vocabulary."""
    d_weight: Tensor
    """[V/tp, Hs]"""


Run = Callable[[], Gradients]


@dataclass(frozen=True)
class Contender:
    """An implementation of an objective: one table row."""

    name: str
    objective: Objective
    build: Callable[[Inputs], Run]
    """Imports packages and allocates buffers; both may fail."""
    tokens: Tensor | None = None
    """[M] int64 supervised tokens, over which the mean is taken; None: all."""
    about_tokens: str = "all"
    sparse: bool = False
    """The teacher is sparse: it has no matrix product, and the gradients are not those of the objective."""


def differentiate(loss: Tensor, inputs: Inputs) -> Gradients:
    """Gradients by autograd."""
    return Gradients(loss.detach(), *torch.autograd.grad(loss, (inputs.hidden, inputs.weight)))


def reference_gradients(inputs: Inputs, objective: Objective, rows_at_once: int = 256) -> Gradients:
    """Gradients of the definitions in `mkd.losses.reference`, in fp32 with fp32 weights (float64 for fp32 inputs),
    computed `rows_at_once` tokens at a time. Collective."""
    wide = torch.float64 if inputs.hidden.dtype == torch.float32 else torch.float32
    head = inputs.whole(inputs.weight).to(wide)
    teacher_head = inputs.whole(inputs.teacher_weight).to(wide) if objective.kd else None
    count = inputs.hidden.shape[0]
    total = head.new_zeros((), dtype=torch.float64)
    d_hidden = head.new_empty((count, head.shape[1]))
    d_weight = torch.zeros_like(inputs.weight, dtype=wide)
    first = inputs.group.rank() * d_weight.shape[0]
    for start in range(0, count, rows_at_once):
        rows = slice(start, start + rows_at_once)
        h = inputs.hidden[rows].detach().to(wide)
        z = (h @ head.t()).requires_grad_()
        terms = []
        if objective.ce:
            terms.append(objective.ce * reference.cross_entropy(z, inputs.labels[rows]))
        if objective.kd:
            u = inputs.teacher_hidden[rows].to(wide) @ teacher_head.t()
            terms.append(objective.kd * getattr(reference, objective.spec.divergence)(z, u, objective.spec))
        loss = torch.stack(terms).sum() / count
        (d_logits,) = torch.autograd.grad(loss, z)
        total += loss.detach()
        d_hidden[rows] = d_logits @ head
        d_weight.addmm_(d_logits[:, first : first + d_weight.shape[0]].t(), h)
    return Gradients(total, d_hidden, d_weight)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the 2-norm."""
    difference = torch.linalg.vector_norm(actual.detach().to(expected.dtype) - expected, dtype=torch.float64)
    return (difference / torch.linalg.vector_norm(expected, dtype=torch.float64)).item()
