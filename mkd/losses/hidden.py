"""Distances between hidden states of a student's and a teacher's layer, with a trained linear map where widths differ.

One token has y = P h, h its student hidden state [Hs] and P the map [Ht, Hs] (y = h without one), and t, its teacher
hidden state [Ht]:

    mse     mean over Ht of (y - t)^2
    cosine  1 - y . t / (|y| |t|)

`mse` and `cosine` are the definitions, differentiable by autograd in any float dtype. Training uses `hidden_loss`: the
same values, a gradient written by hand, and only its inputs kept for backward.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from mkd.config.values import HiddenLossType

_TINY = 1e-12
"""A shorter vector has no direction: its cosine with any other and its gradient are 0."""


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """[N] mean squared difference per token of two [N, Ht]."""
    return (prediction - target).square().mean(-1)


def cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """[N] 1 - the cosine per token between two [N, Ht]."""
    lengths = torch.linalg.vector_norm(prediction, dim=-1) * torch.linalg.vector_norm(target, dim=-1)
    return 1.0 - (prediction * target).sum(-1) / lengths


def hidden_loss(
    hidden: Tensor, projection: Tensor | None, target: Tensor, weight: Tensor, kind: HiddenLossType
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of weight times distance, and the distance of every token.

    The matrix products have the hidden states' dtype; distances are fp32, or float64 for float64. A token of weight 0
    has no effect: whatever its hidden states hold, its value is 0 and its gradient exactly 0.

    Args:
        hidden: [N, Hs] of the student, differentiable.
        projection: [Ht, Hs], differentiable; None where Hs = Ht and nothing is projected.
        target: [N, Ht] of the teacher, any float dtype; no gradient reaches it.
        weight: [N] fp32.
        kind: mse or cosine.

    Returns:
        The sum [] (differentiable) and the unweighted values [N] (detached), both in the distances' dtype.
    """
    assert kind in get_args(HiddenLossType), kind
    return _HiddenLoss.apply(hidden, projection, target, weight, kind)


class _HiddenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, projection: Tensor | None, target: Tensor, weight: Tensor, kind: HiddenLossType
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, projection, target, weight)
        ctx.kind = kind
        keep = weight != 0
        prediction, wanted = _pair(_zero_unused(hidden, keep), projection, _zero_unused(target, keep))
        values = torch.where(keep, {"mse": mse, "cosine": _guarded_cosine}[kind](prediction, wanted), 0.0)
        ctx.mark_non_differentiable(values)
        return (values * weight).sum(), values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, projection, target, weight = ctx.saved_tensors
        keep = weight != 0
        kept = _zero_unused(hidden, keep)
        prediction, wanted = _pair(kept, projection, _zero_unused(target, keep))
        gradient: Callable = {"mse": _mse_gradient, "cosine": _cosine_gradient}[ctx.kind]
        by_prediction = (gradient(prediction, wanted) * (weight * upstream).unsqueeze(-1)).to(hidden.dtype)
        if projection is None:
            return by_prediction, None, None, None, None
        return by_prediction @ projection, by_prediction.t() @ kept, None, None, None


def _zero_unused(hidden: Tensor, keep: Tensor) -> Tensor:
    """`hidden` [N, H] with zeros in place of tokens that are not kept [N], so that they reach no other token."""
    return hidden.masked_fill(~keep.unsqueeze(-1), 0.0)


def _pair(hidden: Tensor, projection: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor]:
    """Prediction and target [N, Ht] in the distances' dtype."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    prediction = hidden if projection is None else hidden @ projection.t()
    return prediction.to(dtype), target.to(dtype)


def _mse_gradient(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target) * (2.0 / target.shape[-1])


def _guarded_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    _, _, cos = _directions(prediction, target)
    return 1.0 - cos.squeeze(-1)


def _cosine_gradient(prediction: Tensor, target: Tensor) -> Tensor:
    """d(1 - cos)/dy = (cos y/|y| - t/|t|) / |y|."""
    length = torch.linalg.vector_norm(prediction, dim=-1, keepdim=True)
    ours, theirs, cos = _directions(prediction, target)
    return torch.where(length > _TINY, (cos * ours - theirs) / length, 0.0)


def _directions(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors [N, Ht] of both, 0 for a vector without length, and their cosines [N, 1]."""
    ours, theirs = (torch.nn.functional.normalize(x, dim=-1, eps=_TINY) for x in (prediction, target))
    return ours, theirs, (ours * theirs).sum(-1, keepdim=True)
