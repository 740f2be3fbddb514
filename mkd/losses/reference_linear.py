"""The loss from hidden states by its definition and autograd, all logits at once: `--kd-loss-impl reference`."""

import torch
from torch import Tensor

from mkd.losses import reference
from mkd.losses.logits import LogitMap, Setting, statistics_dtype
from mkd.losses.rows import Rows


def linear_loss(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None] | None,
    rows: Rows,
    setting: Setting,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, ce, kd) as `LossOutput` has them, differentiable in the student's tensors.

    Args:
        student, teacher: (hidden states [N, H], LM head [V, H], bias [V] or None).
        rows: labels and weights of the N tokens.
        setting: one shard, which is the whole vocabulary.
    """
    z = _logits(*student, rows.unused_by_student(), setting, setting.maps.student)
    loss, ce, kd = z.sum() * 0.0, None, None
    if rows.ce_weight is not None:
        used = rows.ce_weight != 0
        legal = (rows.labels >= 0) & (rows.labels < setting.shard.true_vocab)
        ce = torch.where(used, reference.cross_entropy(z, torch.where(used & legal, rows.labels, 0)), 0)
        ce = ce.masked_fill(used & ~legal, torch.nan)
        loss = loss + (rows.ce_weight * ce).sum()
        if setting.spec.z_loss:
            loss = loss + setting.spec.z_loss * (rows.ce_weight * reference.z_loss(z)).sum()
        ce = ce.detach()
    if teacher is not None:
        u = _logits(*teacher, rows.unused_by_teacher(), setting, setting.maps.teacher).detach()
        kd = reference.DIVERGENCES[setting.spec.divergence](z, u, setting.spec)
        kd = torch.where(rows.kd_weight != 0, kd, 0)
        loss = loss + (rows.kd_weight * kd).sum()
        kd = kd.detach()
    return loss, ce, kd


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, unused: Tensor, setting: Setting, logit_map: LogitMap
) -> Tensor:
    """[N, true vocabulary] in the precision of the statistics; 0 where unused."""
    dtype, columns = statistics_dtype(hidden), setting.shard.columns
    products = hidden.to(dtype).masked_fill(unused, 0) @ weight[:columns].to(dtype).t()
    if bias is not None:
        products = products + bias[:columns].to(dtype)
    logits = products * logit_map.scale
    if logit_map.softcap is not None:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    return logits
