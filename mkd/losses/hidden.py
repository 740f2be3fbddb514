"""Distances between hidden states of a student's and a teacher's layer, with a trained linear map where widths differ.

One token has y = P h, h its student hidden state [Hs] and P the map [Ht, Hs] (y = h without one), and t, its teacher
hidden state [Ht]:

    mse     mean over Ht of (y - t)^2
    cosine  1 - y . t / (|y| |t|)

`mse` and `cosine` are the definitions, differentiable by autograd in any float dtype. `hidden_loss` is what training
uses: the same values, a gradient written by hand, and nothing kept for backward but its inputs.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from mkd.config.kd_config import HiddenLossType

_TINY = 1e-12
"""A vector that is shorter has no direction: its cosine with anything is 0, and so is the gradient."""


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """[N] the mean squared difference of the rows of two [N, Ht]."""
    return (prediction - target).square().mean(-1)


def cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """[N] 1 - the cosine between the rows of two [N, Ht]."""
    lengths = torch.linalg.vector_norm(prediction, dim=-1) * torch.linalg.vector_norm(target, dim=-1)
    return 1.0 - (prediction * target).sum(-1) / lengths


def hidden_loss(
    hidden: Tensor, projection: Tensor | None, target: Tensor, weight: Tensor, kind: HiddenLossType
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of weight times distance, and every token's distance.

    The matrix products have the hidden states' dtype; distances are fp32, or float64 of float64. A token of weight 0
    takes no part: whatever its hidden states hold, its value is 0 and its gradient exactly 0.

    Args:
        hidden: [N, Hs] of the student; differentiable.
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
        prediction, wanted = _pair(_only(hidden, keep), projection, _only(target, keep))
        values = torch.where(keep, {"mse": mse, "cosine": _guarded_cosine}[kind](prediction, wanted), 0.0)
        ctx.mark_non_differentiable(values)
        return (values * weight).sum(), values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, projection, target, weight = ctx.saved_tensors
        keep = weight != 0
        kept = _only(hidden, keep)
        prediction, wanted = _pair(kept, projection, _only(target, keep))
        gradient: Callable = {"mse": _mse_gradient, "cosine": _cosine_gradient}[ctx.kind]
        by_prediction = (gradient(prediction, wanted) * (weight * upstream).unsqueeze(-1)).to(hidden.dtype)
        if projection is None:
            return by_prediction, None, None, None, None
        return by_prediction @ projection, by_prediction.t() @ kept, None, None, None


def _only(rows: Tensor, keep: Tensor) -> Tensor:
    """`rows` [N, H] with zeros, which reach no other row, in place of those that are not kept [N]."""
    return rows.masked_fill(~keep.unsqueeze(-1), 0.0)


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
    """Unit vectors [N, Ht] of the rows of both, 0 of a row without length, and their cosines [N, 1]."""
    ours, theirs = (torch.nn.functional.normalize(rows, dim=-1, eps=_TINY) for rows in (prediction, target))
    return ours, theirs, (ours * theirs).sum(-1, keepdim=True)
