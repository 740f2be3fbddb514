"""Types of the values of flags: choices, the divergence and its temperature, schedules, pairs of layers."""

import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, get_args

from mkd.errors import MkdConfigError

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd"]
"""Divergences between teacher p and student q, both softmax(logits / T)."""

TeachersMode = Literal["sum", "averaged_logits", "select"]
"""Combinations of several teachers."""

XTokenLoss = Literal["partition_kl", "p_kl", "gold", "gold_relaxed"]
"""Losses from a teacher with another tokenizer."""

LogitsDtype = Literal["auto", "bf16", "fp32"]
"""Precision of the logits that the LM heads' matrix products write."""

LossImplementation = Literal["auto", "reference", "eager", "triton"]
"""Implementations of the loss."""

HiddenLossType = Literal["mse", "cosine"]
"""Distances between hidden states of a student's and a teacher's layer."""

Packing = Literal["none", "best_fit"]
"""Layouts of samples in rows."""

SKEWED = ("skew_forward_kl", "skew_reverse_kl")
"""The divergences with a `skew`."""


def divergence_text(divergence: str, beta: float, skew: float) -> str:
    """The name of a divergence with its parameter, such as jsd (beta 0.5)."""
    if divergence == "jsd":
        return f"jsd (beta {beta:g})"
    return f"{divergence} (skew {skew:g})" if divergence in SKEWED else divergence


def require_choice(flag: str, value: object, choices: tuple) -> None:
    """Raise MkdConfigError unless the value is one of the choices."""
    if value not in choices:
        guesses = get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {guesses[0]!r}?)" if guesses else ""
        raise MkdConfigError(f"{flag} is {value!r}; legal values are {', '.join(map(repr, choices))}{hint}")


def require_temperature(flag: str, value: float) -> None:
    """Raise MkdConfigError unless the value is a valid temperature."""
    if not (math.isfinite(value) and value > 0):
        raise MkdConfigError(f"{flag} is {value}; a temperature must be a finite number > 0")


def require_ratio(flag: str, value: float) -> None:
    """Raise MkdConfigError unless the value is a valid share of KD."""
    if not 0.0 <= value <= 1.0:
        raise MkdConfigError(
            f"{flag} is {value}; a ratio must be in [0, 1] (0: cross-entropy only, 1: distillation only)"
        )


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The divergence to minimize and its temperature. Formulas: docs/losses.md."""

    divergence: Divergence = "forward_kl"
    """With p the teacher and q the student: forward_kl is KL(p || q), reverse_kl KL(q || p), tvd 0.5 sum |p - q|;
    jsd is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q; skew_forward_kl is
    KL(p || skew p + (1 - skew) q), skew_reverse_kl KL(q || (1 - skew) p + skew q)."""

    beta: float = 0.5
    """Teacher's share of the mixture in jsd, 0 < beta < 1. Other divergences do not read it."""

    skew: float = 0.1
    """Share of the first distribution in the mixture of the skewed KLs, 0 <= skew < 1; at 0 they are the KLs. Other
    divergences do not read it."""

    temperature: float = 1.0
    """T > 0: both distributions are softmax(logits / T)."""

    temperature_squared: bool = True
    """Multiply the divergence by T^2, in value and gradient, so that its gradient keeps its size as T grows
    (Hinton et al. 2015, section 2)."""

    z_loss: float = 0.0
    """Coefficient >= 0: CE becomes CE + z_loss * (ln sum_j exp z_j)^2, at T = 1 and with CE's weight. The reported
    CE excludes it."""

    temperature_factor: float = field(init=False, repr=False, compare=False)
    """The factor in front of the divergence: T^2, or 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature_factor", self.temperature**2 if self.temperature_squared else 1.0)
        require_choice("--kd-loss", self.divergence, get_args(Divergence))
        require_temperature("--kd-temperature", self.temperature)
        if self.divergence == "jsd" and not 0.0 < self.beta < 1.0:
            raise MkdConfigError(
                f"--kd-beta is {self.beta}; jsd needs 0 < beta < 1. Its endpoints are not the KL divergences (there "
                "it is 0 for every student): for KL(teacher || student) give --kd-loss forward_kl, for "
                "KL(student || teacher) --kd-loss reverse_kl"
            )
        if self.divergence in SKEWED and not 0.0 <= self.skew < 1.0:
            raise MkdConfigError(
                f"--kd-skew is {self.skew}; {self.divergence} needs 0 <= skew < 1 (at 0 it is the KL without skew, at "
                "1 it is 0 for every student)"
            )
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0.0):
            raise MkdConfigError(f"--kd-z-loss is {self.z_loss}; a coefficient must be a finite number >= 0")


@dataclass(frozen=True)
class Schedule:
    """A value that changes over training iterations."""

    shape: Literal["constant", "linear", "cosine"]
    start: float
    end: float
    steps: int

    @classmethod
    def constant(cls, value: float) -> "Schedule":
        return cls("constant", value, value, 1)

    @classmethod
    def parse(cls, flag: str, text: str) -> "Schedule":
        """Read `linear:START:END:STEPS` or `cosine:START:END:STEPS`."""
        shape, *numbers = text.split(":")
        try:
            start, end, steps = float(numbers[0]), float(numbers[1]), int(numbers[2])
        except (IndexError, ValueError):
            start = end = steps = None
        if shape not in ("linear", "cosine") or len(numbers) != 3 or steps is None or steps < 1:
            raise MkdConfigError(
                f"{flag} is {text!r}; write constant, linear:START:END:STEPS or cosine:START:END:STEPS, with STEPS >= 1"
            )
        return cls(shape, start, end, steps)

    def value(self, iteration: int) -> float:
        """The value at an iteration counted from 0; END from iteration STEPS on."""
        done = min(max(iteration / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * done

    def __str__(self) -> str:
        if self.shape == "constant":
            return f"{self.start:g}"
        return f"{self.shape} from {self.start:g} to {self.end:g} over {self.steps} iterations"


@dataclass(frozen=True, order=True)
class LayerPair:
    """A student layer whose output is pulled toward a teacher layer's; both counted from 1."""

    student: int
    teacher: int

    def __str__(self) -> str:
        return f"{self.student}:{self.teacher}"

    @classmethod
    def parse_all(cls, flag: str, text: str) -> tuple["LayerPair", ...]:
        """Read `S:T,S:T,...`, each pair once."""
        pairs = []
        for part in text.split(","):
            numbers = part.strip().split(":")
            if len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
                raise MkdConfigError(
                    f"{flag} is {text!r}: {part!r} is no pair; write STUDENT:TEACHER,... with layers counted from 1, "
                    "such as 4:8,8:16"
                )
            pair = cls(*map(int, numbers))
            if pair in pairs:
                raise MkdConfigError(f"{flag} is {text!r}: the pair {pair} occurs twice")
            pairs.append(pair)
        return tuple(pairs)
