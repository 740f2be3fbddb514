"""Losses between tokenizers on a GPU: Triton's kernels, and half precision beside eager torch in the same dtype."""

import math

import pytest
import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses import LinearLogits, LossOptions, TokenWeights, VocabLayout, reference
from mkd.xtoken.loss import reference as definitions
from mkd.xtoken.loss.chunks import TokenChunks
from mkd.xtoken.loss.xtoken_loss import xtoken_loss
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary
from tests.support.tolerance import FP32, HALF_FACTOR, assert_close_norm, norm_error

pytestmark = pytest.mark.gpu

UPSTREAM = 3.7
STUDENT_VOCAB, TEACHER_VOCAB, COMMON, PADDED = 5003, 6007, 4000, 5120
SIZES = [(1, 1), (1, 1), (2, 1), (1, 3), (1, 1), (3, 2)] * 12
"""Tokens of each chunk."""


class Text:
    """Both models in `dtype`, and chunks of one and of several tokens; chunk 4 does not count."""

    def __init__(self, dtype: torch.dtype) -> None:
        gen = torch.Generator("cuda").manual_seed(8)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=gen, device="cuda")).to(dtype)

        sizes = torch.tensor(SIZES)
        numbers = torch.arange(len(sizes))
        self.chunk = [numbers.repeat_interleave(sizes[:, side]).cuda() for side in (0, 1)]
        self.first = [torch.diff(c, prepend=c.new_tensor([-1])) != 0 for c in self.chunk]
        orders = [torch.randperm(v, generator=gen, device="cuda") for v in (STUDENT_VOCAB, TEACHER_VOCAB)]
        self.pairs = torch.stack([order[:COMMON] for order in orders], dim=1)
        self.hidden, self.teacher_hidden = normal(len(self.chunk[0]), 64), normal(len(self.chunk[1]), 96)
        self.weight, self.teacher_weight = normal(PADDED, 64, scale=0.25), normal(TEACHER_VOCAB, 96, scale=0.2)
        picks = torch.randint(0, COMMON, (len(sizes),), generator=gen, device="cuda")
        self.labels = [self.pairs[picks[chunk], side] for side, chunk in enumerate(self.chunk)]
        self.kd_weight = torch.rand(len(sizes), generator=gen, device="cuda") + 0.1
        self.kd_weight[4] = 0
        self.ce_weight = torch.rand(len(self.hidden), generator=gen, device="cuda")
        self.ids = torch.randint(0, TEACHER_VOCAB, (STUDENT_VOCAB, 2), generator=gen, device="cuda")
        self.ids[self.pairs[:, 0]] = torch.nn.functional.pad(self.pairs[:, 1:], (0, 1), value=-1)
        self.shares = torch.tensor([0.9, 0.1], device="cuda").repeat(STUDENT_VOCAB, 1)
        self.shares[self.pairs[:, 0]] = torch.tensor([1.0, 0.0], device="cuda")

    def by_definition(self, kind: str, spec: LossSpec, dtype: torch.dtype) -> list[Tensor]:
        """(loss, gradients of hidden states and of the LM head's real rows)."""
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight[:STUDENT_VOCAB]))
        z, u = hidden @ weight.t(), self.teacher_hidden.to(dtype) @ self.teacher_weight.to(dtype).t()
        loss = (self.ce_weight.to(dtype) * reference.cross_entropy(z, self.labels[0])).sum()
        dense = torch.zeros(STUDENT_VOCAB, TEACHER_VOCAB, dtype=torch.float32, device="cuda")
        dense.scatter_add_(1, self.ids.clamp_min(0), torch.where(self.ids >= 0, self.shares, 0))
        dense = (dense / dense.sum(dim=1, keepdim=True)).to(dtype)
        for number, weight_of_chunk in enumerate(self.kd_weight.tolist()):
            if weight_of_chunk:
                s, t = (chunk == number for chunk in self.chunk)
                labels = self.labels[0][s], self.labels[1][t]
                if kind == "partition_kl":
                    value = definitions.partition_kl(z[s], u[t], *labels, self.pairs, spec)
                elif kind == "p_kl":
                    value = definitions.p_kl(z[s], u[t], dense, spec)
                else:
                    value = definitions.gold(z[s], u[t], self.pairs, spec, 512)
                loss = loss + weight_of_chunk * value
        return [loss.detach(), *torch.autograd.grad(UPSTREAM * loss, (hidden, weight))]

    def by_mkd(self, kind: str, spec: LossSpec, **options: object) -> list[Tensor]:
        sizes = {"student_vocab": STUDENT_VOCAB, "teacher_vocab": TEACHER_VOCAB, "student_width": PADDED}
        vocabulary = CrossVocabulary.of(kind, self.ids, self.shares, self.pairs, **sizes, device="cuda")
        leaves = [x.detach().requires_grad_() for x in (self.hidden, self.weight)]
        out = xtoken_loss(
            LinearLogits(*leaves),
            LinearLogits(self.teacher_hidden, self.teacher_weight[vocabulary.teacher_columns]),
            TokenWeights(self.labels[0], self.ce_weight, None),
            TokenChunks(self.chunk[0], self.first[0], self.chunk[1], self.first[1], self.labels[1], self.kd_weight),
            vocabulary=vocabulary,
            spec=spec,
            vocab=VocabLayout(STUDENT_VOCAB),
            options=LossOptions(**options),
            uncommon_top_k=512,
        )
        d_hidden, d_weight = torch.autograd.grad(UPSTREAM * out.loss, leaves)
        assert not d_weight[STUDENT_VOCAB:].any()
        return [out.loss.detach(), d_hidden, d_weight[:STUDENT_VOCAB]]


ONE_SIGN = 3e-4
"""Gold compares sorted probabilities by signs; where two are equal but for rounding, a sign moves the gradient by about
1e-4 (fp32 torch has such signs too)."""
NAMES = ("loss", "d_hidden", "d_weight")
every_kind = pytest.mark.parametrize("kind", ["partition_kl", "p_kl", "gold"])
every_divergence = pytest.mark.parametrize("divergence, temperature", [("forward_kl", 1.0), ("jsd", 2.0)])


@every_kind
@every_divergence
@pytest.mark.parametrize("chunk_rows", [None, 50])
def test_against_the_definition(kind: str, divergence: str, temperature: float, chunk_rows: int | None) -> None:
    """The gradients of gold may differ by `ONE_SIGN`."""
    text, spec = Text(torch.float32), LossSpec(divergence=divergence, temperature=temperature)
    truth = text.by_definition(kind, spec, torch.float64)
    seen = text.by_mkd(kind, spec, chunk_rows=chunk_rows)
    for name, actual, wanted in zip(NAMES, seen, truth, strict=True):
        assert_close_norm(actual, wanted, ONE_SIGN if kind == "gold" and name != "loss" else FP32, name)


@every_kind
@every_divergence
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: str, divergence: str, temperature: float, dtype: torch.dtype) -> None:
    """No worse than eager torch's logits and gradients in the same dtype."""
    text, spec = Text(dtype), LossSpec(divergence=divergence, temperature=temperature)
    truth = text.by_definition(kind, spec, torch.float64)
    eager = text.by_definition(kind, spec, dtype)
    for name, actual, wanted, theirs in zip(NAMES, text.by_mkd(kind, spec), truth, eager, strict=True):
        allowed = norm_error(theirs, wanted)
        if not math.isfinite(allowed):  # eager torch's fp16 has overflowed
            allowed = torch.finfo(dtype).eps
        assert norm_error(actual, wanted) <= HALF_FACTOR * allowed, name


@every_kind
def test_repeats_bit_for_bit(kind: str) -> None:
    text, spec = Text(torch.bfloat16), LossSpec(divergence="jsd")
    first, second = (text.by_mkd(kind, spec) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
