"""Options of low-rank adapters (`--kd-lora`)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mkd.errors import MkdConfigError

LARGEST_RANK = 4096

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers except the LM head; routed experts are parameters, not linear layers."""

EXPERTS = "experts"
"""Part of the names of routed experts' parameters, such as experts.down_proj."""


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of a frozen model: a linear layer W computes W x + scale B A x."""

    rank: int
    """Rows of A and columns of B."""
    alpha: float
    modules: tuple[str, ...] | None = None
    """Names of linear layers as in PEFT's `target_modules`, and of routed experts' parameters as in
    `target_parameters`; None for all linear layers except the LM head."""

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / self.rank

    @classmethod
    def parse(cls, text: str, modules: Sequence[str] | None) -> "LoraOptions":
        """The options in the values of --kd-lora, RANK or RANK:ALPHA, and --kd-lora-modules.

        Raises:
            MkdConfigError: they have another form, or are out of bounds.
        """
        found = re.fullmatch(r"([0-9]{1,9})(?::([0-9.eE+-]{1,40}))?", text)
        if found is None:
            raise MkdConfigError(f"--kd-lora is {text!r}; give RANK or RANK:ALPHA, such as 16 or 16:32")
        rank = int(found[1])
        if not 1 <= rank <= LARGEST_RANK:
            raise MkdConfigError(f"--kd-lora {text}: the rank is {rank}; it must be at least 1 and at most 4096")
        try:
            alpha = float(rank if found[2] is None else found[2])
        except ValueError:
            raise MkdConfigError(
                f"--kd-lora {text}: {found[2]!r} is not a number; give RANK:ALPHA, such as 16:32"
            ) from None
        if not (math.isfinite(alpha) and 0.0 < alpha <= 1e6):
            raise MkdConfigError(f"--kd-lora {text}: alpha is {alpha:g}; it must be above 0 and at most 1e6")
        if modules is not None and ALL_LINEAR in modules:
            if any(EXPERTS not in name.split(".") for name in modules if name != ALL_LINEAR):
                raise MkdConfigError(
                    f"--kd-lora-modules {' '.join(modules)}: {ALL_LINEAR} stands alone, or beside names of routed "
                    "experts such as experts.down_proj"
                )
            modules = None if set(modules) == {ALL_LINEAR} else modules
        return cls(rank, alpha, None if modules is None else tuple(dict.fromkeys(modules)))

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}"
