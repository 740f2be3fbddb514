"""Calibration of the student against the teacher: a table over bins of probability, and its error."""

from collections.abc import Mapping, Sequence

from torch import Tensor

Calibration = Mapping[str, Sequence[float | None]]
"""Column -> one value per bin; None in empty bins."""


def calibration_table(sums: Tensor) -> dict[str, list[float | None]]:
    """Means per bin of the teacher's top-1 probability p.

    Args:
        sums: [bins, 4] from `mkd.train.evaluation.calibration_sums`, added up over the whole evaluation.

    Returns:
        `tokens` and their `share` in each bin; `teacher`, `student` and `agreement`: mean of p, of the student's
        probability of the same token, and of the top-1 agreement; None in empty bins.
    """
    count, *others = sums.t().tolist()
    total = sum(count) or 1.0
    table: dict[str, list[float | None]] = {"tokens": count, "share": [n / total for n in count]}
    for name, values in zip(("teacher", "student", "agreement"), others, strict=True):
        table[name] = [value / n if n else None for value, n in zip(values, count, strict=True)]
    return table


def calibration_error(table: Calibration) -> float:
    """Expected calibration error, in [0, 1]: sum over bins of share * |mean student - mean teacher probability|."""
    bins = zip(table["share"], table["teacher"], table["student"], strict=True)
    return sum(share * abs(student - teacher) for share, teacher, student in bins if share)
