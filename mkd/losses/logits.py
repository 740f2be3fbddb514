"""A chunk of logits, and how they follow from the LM heads' products."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.rows import TokenWeights
from mkd.losses.vocab_shard import VocabShard

if TYPE_CHECKING:
    from mkd.losses.sparse.passes import TopColumns


@dataclass(frozen=True)
class LogitMap:
    """What a model does to the product of its LM head: z = cap * tanh(scale * x / cap), or scale * x without a cap.

    A product of -inf marks a column that takes no part, and stays so under a cap.
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
        """d logits / d products, from the logits."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.softcap).square()).clamp_min(0.0)


class LogitMaps(NamedTuple):
    """Of both models."""

    student: LogitMap = LogitMap()
    teacher: LogitMap = LogitMap()


PLAIN_LOGITS = LogitMaps()


@dataclass(frozen=True)
class KernelContext:
    """What is the same for all rows of a loss."""

    spec: LossSpec
    shard: VocabShard
    maps: LogitMaps = PLAIN_LOGITS
    with_kd: bool = True

    @property
    def temperature(self) -> float:
        """Of the first round's statistics: 1 if there is no divergence."""
        return self.spec.temperature if self.with_kd else 1.0


class TailCoeffs(NamedTuple):
    """What one shard's gradient is made of where the teacher names no column; each [rows].

    Of a logit z it is ce * e^(z - top - ce_log_norm) + kd * e^((z - top) / T - kd_log_norm), and `label` less in the
    label's column.
    """

    used: Tensor
    """bool; a row that is not has a gradient of 0, whatever it holds."""
    top: Tensor
    """At least the largest logit of the shard that is not -inf."""
    ce: Tensor
    ce_log_norm: Tensor
    kd: Tensor
    kd_log_norm: Tensor
    label: Tensor
    label_column: Tensor
    """int64; -1 where the label's column is not among them."""


class Chunk(NamedTuple):
    """LM-head products of some rows over the shard's real columns, before `LogitMap`."""

    student: Tensor
    """[rows, columns], any float dtype, columns contiguous."""
    teacher: "Tensor | TopColumns | None"
    """[rows, columns], same, or a sparse teacher's part; None without a divergence."""
    rows: TokenWeights


def statistics_dtype(inputs: Tensor) -> torch.dtype:
    """fp32, or float64 for float64 inputs."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32
