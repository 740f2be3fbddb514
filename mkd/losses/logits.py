"""A chunk of logits, and how they follow from the LM heads' products."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config import LossSpec
from mkd.losses.rows import Rows
from mkd.losses.vocab_shard import VocabShard


@dataclass(frozen=True)
class LogitMap:
    """What a model does to the product of its LM head: z = cap * tanh(scale * x / cap), or scale * x without a cap."""

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
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        return products

    def derivative(self, logits: Tensor) -> Tensor | float:
        """d logits / d products, from the logits."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.softcap).square())


class LogitMaps(NamedTuple):
    """Of both models."""

    student: LogitMap = LogitMap()
    teacher: LogitMap = LogitMap()


PLAIN_LOGITS = LogitMaps()


@dataclass(frozen=True)
class Setting:
    """What is the same for all rows of a loss."""

    spec: LossSpec
    shard: VocabShard
    maps: LogitMaps = PLAIN_LOGITS
    with_kd: bool = True

    @property
    def temperature(self) -> float:
        """Of the first round's statistics: 1 if there is no divergence."""
        return self.spec.temperature if self.with_kd else 1.0


class Chunk(NamedTuple):
    """LM-head products of some rows over the shard's real columns, before `LogitMap`."""

    student: Tensor
    """[rows, columns], any float dtype, columns contiguous."""
    teacher: Tensor | None
    """[rows, columns], same; None without a divergence."""
    rows: Rows


def statistics_dtype(inputs: Tensor) -> torch.dtype:
    """fp32, or float64 for float64 inputs."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32
