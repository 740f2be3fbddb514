"""Values that change over the iterations of a run, such as R and T (--kd-ratio-schedule, --kd-temperature-schedule)."""

import math
from dataclasses import dataclass
from typing import Literal

from mkd.errors import MkdConfigError


@dataclass(frozen=True)
class Schedule:
    """A value that changes over training iterations."""

    shape: Literal["constant", "linear", "cosine"]
    start: float
    end: float
    steps: int

    @classmethod
    def constant(cls, value: float) -> "Schedule":
        """The same value at every iteration."""
        return cls("constant", value, value, 1)

    @classmethod
    def parse(cls, flag: str, text: str) -> "Schedule":
        """Read `linear:START:END:STEPS` or `cosine:START:END:STEPS`.

        Raises:
            MkdConfigError: names the flag and the accepted forms.
        """
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
