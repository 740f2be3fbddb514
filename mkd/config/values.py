"""Choices of flags, pairs of layers, and checks of single values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from mkd.config.bounds import check_number
from mkd.errors import MkdConfigError

TeacherApi = Literal["auto", "mkd", "vllm", "sglang"]
RolloutApi = Literal["auto", "vllm", "sglang"]
ServedTargets = Literal["hidden_states", "top_k", "sampled"]
SignalsMemory = Literal["auto", "device", "host"]
"""Memory in which a teacher's hidden states wait for the student."""
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


DataForm = Literal["messages", "sharegpt", "alpaca", "prompt_completion"]
"""Forms of records of conversations."""

DataFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion"]
"""A form of records, or the one that the keys of each record show."""

BadRecordsMode = Literal["error", "skip"]
"""Treatments of broken records."""


BestMetric = Literal["accuracy", "ce"]
"""Metrics of evaluations by which checkpoints are compared."""

CutOffMode = Literal["learn", "drop"]
"""Treatments of written texts without an end."""


GuardMode = Literal["off", "warn", "stop"]
"""Reactions to written texts that run away."""


_LONGEST_NAME = 50
"""Characters of a value that are compared with names."""


def require_choice(flag: str, value: object, choices: tuple) -> None:
    """Raise MkdConfigError unless the value is one of the choices."""
    if value not in choices:
        hint = nearest_hint(str(value), choices)
        raise MkdConfigError(f"{flag} is {value!r}; legal values are {', '.join(map(repr, choices))}{hint}")


def nearest_hint(value: str, choices: Sequence[str]) -> str:
    """A question in parentheses with the choice that is spelled most like the value; empty if none is close."""
    guesses = get_close_matches(value[:_LONGEST_NAME], choices, n=1)
    return f" (did you mean {guesses[0]!r}?)" if guesses else ""


def require_temperature(flag: str, value: float) -> None:
    """Raise MkdConfigError unless the value is a valid temperature."""
    if not (math.isfinite(value) and value > 0):
        raise MkdConfigError(f"{flag} is {value}; a temperature must be a finite number > 0")
    check_number(flag, "kd_temperature", value)


def require_ratio(flag: str, value: float) -> None:
    """Raise MkdConfigError unless the value is a valid share of KD."""
    if not 0.0 <= value <= 1.0:
        raise MkdConfigError(
            f"{flag} is {value}; a ratio must be in [0, 1] (0: cross-entropy only, 1: distillation only)"
        )


@dataclass(frozen=True, order=True)
class LayerPair:
    """A student layer whose output is pulled toward a teacher layer's; both counted from 1."""

    student: int
    teacher: int

    def __str__(self) -> str:
        return f"{self.student}:{self.teacher}"

    @classmethod
    def parse_all(cls, flag: str, text: str) -> tuple["LayerPair", ...]:
        """Read `S:T,S:T,...`, each pair once.

        Raises:
            MkdConfigError: names the flag and the part that is not a pair, or occurs twice.
        """
        pairs = []
        for part in text.split(","):
            numbers = part.strip().split(":")
            if len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
                raise MkdConfigError(
                    f"{flag} is {text!r}: {part!r} is not a pair; write STUDENT:TEACHER,... with layers counted from "
                    "1, such as 4:8,8:16"
                )
            pair = cls(*map(int, numbers))
            if pair in pairs:
                raise MkdConfigError(f"{flag} is {text!r}: the pair {pair} occurs twice")
            pairs.append(pair)
        return tuple(pairs)
