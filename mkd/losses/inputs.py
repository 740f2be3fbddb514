"""Inputs of a loss: labels and weights per token, logits as products with an LM head, and what all kernels share."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.values import LossSpec
from mkd.losses.vocab_shard import VocabShard


def statistics_dtype(inputs: Tensor) -> torch.dtype:
    """Precision of all sums and values per token: fp32, or float64 for float64 inputs."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class LogitMap:
    """From the product x of an LM head to the logit: z = cap * tanh(scale * x / cap), or scale * x without a cap.

    A product of -inf marks an impossible column and stays -inf under a cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; it must be > 0")

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and self.softcap is None

    def apply_(self, products: Tensor) -> Tensor:
        """Products -> logits, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            impossible = products == -torch.inf
            products.div_(self.softcap).tanh_().mul_(self.softcap).masked_fill_(impossible, -torch.inf)
        return products

    def derivative(self, logits: Tensor) -> Tensor | float:
        """d logits / d products, computed from the logits."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.softcap).square()).clamp_min(0.0)


class LogitMaps(NamedTuple):
    """The logit maps of both models."""

    student: LogitMap = LogitMap()
    teacher: LogitMap = LogitMap()


PLAIN_LOGITS = LogitMaps()


@dataclass(frozen=True)
class LinearLogits:
    """One model's logits as final hidden states times this rank's shard of the LM head; never formed as a whole.

    It is the type of the student, and of a teacher with its full distribution (a sparse one is a `SparseTeacher`).
    """

    hidden: Tensor
    """[N, H], or [N/tp, H] under sequence parallelism."""
    weight: Tensor
    """[V/tp, H], in the dtype of `hidden`."""
    logit_map: LogitMap = LogitMap()
    bias: Tensor | None = None
    """[V/tp]"""

    def check(self, name: str) -> None:
        """Raise ValueError unless hidden states, LM head and bias fit together; `name` is that of the model."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
            raise ValueError(
                f"{name}_hidden is {tuple(hidden.shape)} {hidden.dtype} and {name}_weight {tuple(weight.shape)} "
                f"{weight.dtype}; needed: [N, H] and [V/tp, H] of one dtype"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}_bias has shape {tuple(bias.shape)} and {name}_weight {tuple(weight.shape)}")


@dataclass(frozen=True)
class TokenWeights:
    """Labels and weights of N tokens; None for the weights of a term that is not computed."""

    labels: Tensor
    """[N] int64 global ids; anything where `ce_weight` is 0."""
    ce_weight: Tensor | None
    """[N] fp32 weights of cross-entropy and z-loss."""
    kd_weight: Tensor | None
    """[N] fp32 weights of the divergence."""

    def checked(self, count: int, dtype: torch.dtype) -> "TokenWeights":
        """Detached and contiguous, with the weights in the dtype of the statistics.

        Raises:
            ValueError: no weights at all, or labels or weights that are not [count].
        """
        if self.ce_weight is None and self.kd_weight is None:
            raise ValueError("ce_weight and kd_weight are both None: there is nothing to compute")
        for name in ("labels", "ce_weight", "kd_weight"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != (count,):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the student has {count} tokens")
        weights = (None if w is None else w.detach().to(dtype).contiguous() for w in (self.ce_weight, self.kd_weight))
        return TokenWeights(self.labels.contiguous(), *weights)

    def __getitem__(self, tokens: slice) -> "TokenWeights":
        weights = (None if w is None else w[tokens] for w in (self.ce_weight, self.kd_weight))
        return TokenWeights(self.labels[tokens], *weights)

    def times(self, factor: Tensor | float) -> "TokenWeights":
        """The same with all weights multiplied by a scalar."""
        return TokenWeights(self.labels, *(None if w is None else w * factor for w in (self.ce_weight, self.kd_weight)))

    def unused_by_student(self) -> Tensor:
        """[N, 1] bool: all weights are 0. The student's logits of such a token, NaN included, must have no effect."""
        return torch.stack([w == 0 for w in (self.ce_weight, self.kd_weight) if w is not None]).all(dim=0)[:, None]

    def unused_by_teacher(self) -> Tensor:
        """[N, 1] bool: the KD weight is 0."""
        return (self.kd_weight == 0)[:, None]


@dataclass(frozen=True)
class KernelContext:
    """What is the same for all tokens of a loss."""

    spec: LossSpec
    shard: VocabShard
    maps: LogitMaps = PLAIN_LOGITS
    with_kd: bool = True

    @property
    def temperature(self) -> float:
        """Temperature of the softmax statistics: 1 if there is no divergence."""
        return self.spec.temperature if self.with_kd else 1.0
