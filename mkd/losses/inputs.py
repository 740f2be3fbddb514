"""Inputs of a loss: labels and weights per token, and logits that are formed one loss chunk at a time.

A model enters a loss as `LinearLogits`, hidden states and LM head. `LMHead` forms the logits of a loss chunk.
"""

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.vocab_shard import VocabShard

CHUNK_BYTES = 192 * 2**20
"""Default size of one model's logits in a loss chunk."""
MIN_CHUNK_TOKENS = 768
"""Default minimum of tokens in a loss chunk on a GPU: with fewer, the GEMMs of the LM heads are bound by reading their
weights."""
MIN_SHARED_CHUNK_TOKENS = 256
"""The same for a loss over a share of a microbatch's tokens (`LossOptions.share`)."""


MAX_FP32_TEMPERATURE = 8.0
"""Above this temperature divergences are computed in float64: both distributions approach the uniform one, their
divergence falls with T^2 below fp32's rounding of the normalizers, and T^2 multiplies what is left."""


def statistics_dtype(inputs: Tensor) -> torch.dtype:
    """Precision of all sums and values per token: fp32, or float64 for float64 inputs."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def tempered_dtype(dtype: torch.dtype, temperature: float) -> torch.dtype:
    """Precision of a divergence at a temperature: `dtype`, or float64 above `MAX_FP32_TEMPERATURE`."""
    return torch.float64 if temperature > MAX_FP32_TEMPERATURE else dtype


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

    def apply_(self, products: Tensor) -> Tensor:
        """Products [...] of any float dtype -> logits, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            impossible = products == -torch.inf
            products.div_(self.softcap).tanh_().mul_(self.softcap).masked_fill_(impossible, -torch.inf)
        return products

    def derivative(self, logits: Tensor) -> Tensor | float:
        """d logits / d products, computed from the logits: in their shape and dtype, or a number without a cap."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.softcap).square()).clamp_min(0.0)


class LogitMaps(NamedTuple):
    """The logit maps of both models."""

    student: LogitMap = LogitMap()
    teacher: LogitMap = LogitMap()


PLAIN_LOGITS = LogitMaps()
"""Logits are the products themselves, in both models."""


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
class LMHead:
    """The real columns of one model's LM head on this rank, as GEMM operands."""

    weight: Tensor
    """[columns, H]"""
    bias: Tensor | None
    """[columns]"""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "LMHead":
        """Build the LM head from a parameter [columns, H] of any float dtype and its bias [columns]."""
        precise = torch.promote_types(weight.dtype, torch.float32)
        return cls(gemm_operand(weight, precise), None if bias is None else bias.detach())

    @classmethod
    def of_columns(cls, model: LinearLogits, columns: int) -> "LMHead":
        """The first `columns` columns of a model's LM head."""
        return cls.of(model.weight[:columns], None if model.bias is None else model.bias[:columns])

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """hidden [N, H] @ weight^T + bias into `out` [N, columns], which is returned."""
        gemm(hidden.detach().to(self.weight.dtype), self.weight.t(), out)
        return out if self.bias is None else out.add_(self.bias)


def gemm_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor unchanged, or in `dtype` where torch has no GEMM from its dtype to `dtype` (half precision on CPU)."""
    has_mixed_gemm = tensor.device.type != "cpu" and dtype == torch.float32
    return tensor.detach() if has_mixed_gemm else tensor.detach().to(dtype)


def gemm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """[n, k] @ [k, m] into `out` [n, m], accumulated in fp32 or better and rounded once, to the dtype of `out`."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cpu":
        return out.copy_(a @ b)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_gemm(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """total [n, m] += a [n, k] @ b [k, m] in the precision of `total`; with `fresh` it is uninitialized, and is set."""
    if fresh:
        gemm(a, b, total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def resolve_logits_dtype(logits_dtype: torch.dtype | None, hidden: Tensor) -> torch.dtype:
    """The dtype of a loss chunk's logits.

    Args:
        logits_dtype: the dtype that is asked for; None selects that of bf16 hidden states on a GPU, else the precision
            of the statistics.
        hidden: the student's hidden states [..., H].

    Raises:
        ValueError: a dtype that no GEMM gives from such hidden states.
    """
    precise = statistics_dtype(hidden)
    if logits_dtype is None:
        return hidden.dtype if hidden.dtype == torch.bfloat16 and hidden.is_cuda else precise
    if logits_dtype not in (precise, hidden.dtype) and hidden.is_cuda:
        raise ValueError(
            f"logits_dtype is {logits_dtype}; from {hidden.dtype} hidden states it can be {hidden.dtype} or {precise}"
        )
    return logits_dtype


def loss_chunks(
    tokens: int, columns: int, dtype: torch.dtype, chunk_rows: int | None, least: int = 1, share: float = 1.0
) -> list[slice]:
    """Cut tokens into loss chunks; zero tokens are one empty chunk.

    Args:
        tokens: their number.
        columns, dtype: of the logits.
        chunk_rows: tokens per chunk; None: as many as `CHUNK_BYTES` of logits hold, but at least `least`, in chunks of
            about equal size and a multiple of 128 tokens if there are that many.
        least: see chunk_rows.
        share: factor of the default `chunk_rows`, down to `MIN_SHARED_CHUNK_TOKENS`.

    Raises:
        ValueError: chunk_rows below 1.
    """
    if chunk_rows is None:
        most = max(least, 1, CHUNK_BYTES // (max(columns, 1) * dtype.itemsize))
        most = max(min(most, MIN_SHARED_CHUNK_TOKENS), int(most * share))
        if most >= 128:
            most -= most % 128
        parts = -(-max(tokens, 1) // most)
        chunk_rows = -(-max(tokens, 1) // parts)
        if parts > 1 and most >= 128:
            chunk_rows += -chunk_rows % 128
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    return [slice(first, min(first + chunk_rows, tokens)) for first in range(0, max(tokens, 1), chunk_rows)]


def interleave(tasks: Iterable[Generator[None, None, None]], at_a_time: int) -> None:
    """Run generators to their ends, at most `at_a_time` of them alive, each advancing one step in turn.

    A task yields where it would wait for other ranks; the next step of another task then fills the time. The order of
    steps depends on nothing but the number of tasks and steps, so it is the same on all ranks.
    """
    waiting = iter(tasks)
    alive: deque[Generator[None, None, None]] = deque()
    while True:
        while len(alive) < at_a_time and (task := next(waiting, None)) is not None:
            alive.append(task)
        if not alive:
            return
        task = alive.popleft()
        try:
            next(task)
        except StopIteration:
            continue
        alive.append(task)


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
    """Parameters of a loss that are the same for all tokens."""

    spec: LossSpec
    shard: VocabShard
    maps: LogitMaps = PLAIN_LOGITS
    with_kd: bool = True
    temperature: float = field(init=False)
    """Temperature of the softmax statistics: 1 if there is no divergence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", self.spec.temperature if self.with_kd else 1.0)

    @property
    def needs_float64(self) -> bool:
        """True if fp32 statistics are too coarse for the temperature; only the eager kernels have float64."""
        return self.temperature > MAX_FP32_TEMPERATURE

    def statistics_dtype(self, inputs: Tensor) -> torch.dtype:
        """Precision of the sums and values per token that are computed from `inputs`."""
        return tempered_dtype(statistics_dtype(inputs), self.temperature)
