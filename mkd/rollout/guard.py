"""Detects a student whose texts run away: they repeat themselves, or do not end."""

from dataclasses import dataclass, field

from mkd.config.run_state import RunState
from mkd.errors import MkdDataError
from mkd.rollout.facts import GRAM, RolloutFacts
from mkd.utils.logging import logger

PATIENCE = 3
"""Rollouts in a row that must be above a threshold."""


@dataclass
class CollapseGuard:
    """Compares the texts of each rollout with thresholds."""

    stops: bool
    """True to end the job; False to print a warning."""
    most_repeated: float
    """Threshold of `RolloutFacts.repeated`."""
    most_cut_off: float
    """Threshold of the share of texts that are cut off."""
    state: RunState = field(default_factory=RunState)
    """Holds the rollouts that are above a threshold, so a resumed run reacts at the same iteration."""

    def check(self, facts: RolloutFacts, iteration: int) -> None:
        """Check the texts of a step, the same on all ranks.

        Args:
            facts: measurements of the texts.
            iteration: of the step, counted from 1.

        Raises:
            MkdDataError: the texts of the last `PATIENCE` rollouts run away, and the guard stops the job.
        """
        cut_off = facts.cut_off / facts.texts
        reasons = []
        if facts.repeated > self.most_repeated:
            reasons.append(
                f"{facts.repeated:.0%} of their runs of {GRAM} tokens are repetitions (--kd-rollout-most-repeated "
                f"{self.most_repeated:g})"
            )
        if cut_off > self.most_cut_off:
            reasons.append(f"{cut_off:.0%} of them are cut off (--kd-rollout-most-cut-off {self.most_cut_off:g})")
        # Megatron may run a step again, in this job or in one that resumes before it.
        is_known = iteration in self.state.runaway_rollouts
        before = [rollout for rollout in self.state.runaway_rollouts if rollout < iteration]
        self.state.runaway_rollouts = (*before[-PATIENCE:], iteration) if reasons else ()
        in_a_row = len(self.state.runaway_rollouts)
        if in_a_row < PATIENCE:
            return
        message = (
            f"the texts that the student writes run away: at iteration {iteration}, and in the {PATIENCE - 1} rollouts "
            f"before it, {' and '.join(reasons)}. docs/on_policy.md lists causes and remedies"
        )
        if self.stops:
            raise MkdDataError(f"{message}; continue from an earlier checkpoint, or give --kd-rollout-guard warn")
        if in_a_row == PATIENCE and not is_known:
            logger.warning(message)
