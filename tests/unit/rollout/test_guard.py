"""The guard of written texts."""

from argparse import Namespace

import pytest

from mkd.config.run_state import RunState
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
        for _ in range(2):  # a step that runs again counts once
            guard.check(facts, iteration)
        counts.append(len(seen))
    assert counts == [0, 0, 1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("resumed_after", range(1, 5))
def test_a_resumed_run_reacts_at_the_same_iteration(resumed_after: int) -> None:
    """Also if the step before the restart runs again."""
    rollouts = dict(enumerate([REPEATED, GOOD, ENDLESS, REPEATED, ENDLESS], start=1))
    state, checked = RunState(), []
    guard = CollapseGuard(stops=True, most_repeated=0.5, most_cut_off=0.95, state=state)
    with pytest.raises(MkdDataError, match="at iteration 5, and in the 2 rollouts before it"):
        for iteration, facts in rollouts.items():
            guard.check(facts, iteration)
            checked.append(iteration)
            if iteration == resumed_after:
                args = Namespace()
                state.write_to(args)
                guard = CollapseGuard(stops=True, most_repeated=0.5, most_cut_off=0.95, state=RunState.read_from(args))
                guard.check(facts, iteration)
    assert checked == [1, 2, 3, 4]


def test_the_state_stays_small() -> None:
    guard = CollapseGuard(stops=False, most_repeated=0.5, most_cut_off=1.0)
    for iteration in range(1, 100):
        guard.check(REPEATED, iteration)
    assert guard.state.runaway_rollouts == (96, 97, 98, 99)
    guard.check(GOOD, 100)
    assert guard.state.runaway_rollouts == ()
