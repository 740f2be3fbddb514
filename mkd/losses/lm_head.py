"""Products with the LM head: of which dtype the coeffs are, and of which the result."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.logits import statistics_dtype
from mkd.losses.rows import TokenWeights

FP16_HEADROOM = 1024.0
"""Where the largest possible logit gradient is put before it is rounded to fp16, whose range is 6e-8 to 65504."""


@dataclass(frozen=True)
class LMHead:
    """The real columns of one model's LM head on this rank, as GEMM coeffs."""

    weight: Tensor
    """[columns, H]"""
    bias: Tensor | None
    """[columns]"""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "LMHead":
        """From a parameter of any float dtype."""
        return cls(gemm_operand(weight, statistics_dtype(weight)), None if bias is None else bias.detach())

    def of_columns(self, columns: int) -> "LMHead":
        """The first `columns` columns."""
        return LMHead(self.weight[:columns], None if self.bias is None else self.bias[:columns])

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """hidden [rows, H] @ weight^T + bias into `out` [rows, columns], which is returned."""
        gemm(gemm_operand(hidden, statistics_dtype(hidden)), self.weight.t(), out)
        return out if self.bias is None else out.add_(self.bias)


def gemm_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A GEMM input: as it came, or in `dtype` where torch has no GEMM from that to `dtype` (half precision on CPU)."""
    has_mixed_gemm = tensor.device.type != "cpu" and dtype == torch.float32
    return tensor.detach() if has_mixed_gemm else tensor.detach().to(dtype)


def gemm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, accumulated in fp32 or better and rounded once, to the dtype of `out`."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cpu":
        return out.copy_(a @ b)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_gemm(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """total += a @ b in the precision of `total`; `fresh`: there is nothing in it yet, total = a @ b."""
    if fresh:
        gemm(a, b, total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def fp16_scale(rows: TokenWeights, spec: LossSpec) -> Tensor:
    """A power of two (scalar, fp32) that brings the largest weight of a logit gradient to about `FP16_HEADROOM`.

    The gradient is formed before the loss scale of mixed-precision training is known, and most q_j of a large
    vocabulary lie under fp16's smallest number.
    """
    weights = [(rows.ce_weight, 1.0), (rows.kd_weight, spec.scale / spec.temperature)]
    bound = torch.stack([w.abs().amax() * times for w, times in weights if w is not None]).sum()
    return torch.ldexp(torch.full_like(bound, FP16_HEADROOM), -torch.frexp(bound).exponent)
