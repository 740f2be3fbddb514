"""The guard of written texts."""

import pytest

from mkd.errors import MkdDataError
from mkd.rollout.facts import RolloutFacts
from mkd.rollout.guard import CollapseGuard
from mkd.utils.logging import logger

GOOD, REPEATED, ENDLESS = (
    RolloutFacts(4, 40, cut_off, 1.0, repeated) for cut_off, repeated in ((1, 0.1), (1, 0.6), (4, 0.1))
)


def test_three_rollouts_in_a_row_end_the_job() -> None:
    guard = CollapseGuard(stops=True, most_repeated=0.5, most_cut_off=0.95)
    for iteration, facts in enumerate([REPEATED, ENDLESS, GOOD, ENDLESS, REPEATED], start=1):
        guard.check(facts, iteration)
    with pytest.raises(MkdDataError) as caught:
        guard.check(REPEATED, 6)
    assert "at iteration 6, and in the 2 rollouts before it, 60% of their runs of 4 tokens are rep" in str(caught.value)
    assert "--kd-rollout-most-repeated 0.5" in str(caught.value) and "cut off" not in str(caught.value)
    with pytest.raises(MkdDataError, match=r"100% of them are cut off \(--kd-rollout-most-cut-off 0.95\)"):
        guard.check(ENDLESS, 7)


def test_one_warning_until_the_texts_are_good_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(logger, "warning", seen.append)
    guard = CollapseGuard(stops=False, most_repeated=0.5, most_cut_off=1.0)
    counts = []
    for iteration, facts in enumerate([REPEATED] * 5 + [ENDLESS] + [REPEATED] * 3):
        guard.check(facts, iteration)
        counts.append(len(seen))
    assert counts == [0, 0, 1, 1, 1, 1, 1, 1, 2]
