"""Measurements of the texts that the student has written for one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.rollout.interface import WrittenText

GRAM = 4
"""Tokens of the runs whose repetition is measured."""


@dataclass(frozen=True)
class RolloutFacts:
    """Measurements of the texts of one step, over all ranks."""

    texts: int
    tokens: int
    cut_off: int
    """Number of texts without an end."""
    seconds: float
    """Seconds of the rollout; 0 in a step whose texts an earlier one wrote."""
    repeated: float = 0.0
    """See `repeated_share`."""
    age: int = 0
    """Optimizer steps since the texts were written."""
    written_now: int | None = None
    """Tokens of the rollout, if it wrote those of later steps too; None: `tokens`."""

    def metrics(self) -> dict[str, float]:
        """Name -> value, for the metrics of an iteration."""
        found = {
            "written_tokens": self.tokens / self.texts,
            "written_cut_off": self.cut_off / self.texts,
            "written_repeated": self.repeated,
            "written_age": float(self.age),
        }
        if self.seconds == 0.0:
            return found
        return found | {"written_tokens_per_s": (self.written_now or self.tokens) / self.seconds}


def repeated_share(texts: Sequence[WrittenText]) -> float:
    """Share of the runs of `GRAM` tokens that have occurred before in the same text; 0 if no text has one."""
    total = repeated = 0
    for text in texts:
        grams = [text.tokens[start : start + GRAM] for start in range(len(text.tokens) - GRAM + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else 0.0
