"""The parts of a job's start, from the first line of its program to the end of the first step, in one line."""

import time

_SHORTEST_S = 0.05
"""Shorter parts are not listed."""


class StartTimes:
    """Measures parts that follow one another. The first one begins with the object, each further one where the part
    before ends."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last = time.monotonic()

    def ended(self, part: str) -> None:
        """A part ends now; seconds of parts with equal names are added."""
        now = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """The seconds of all parts, and of each one in order."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._parts.items() if seconds >= _SHORTEST_S)
        return f"{sum(self._parts.values()):.1f} s to the end of the first step: {parts}"
