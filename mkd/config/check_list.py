"""Lists of checks: a job stops at the first that fails, the doctor collects what all of them find."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

type Sink = Callable[[], AbstractContextManager]
"""Makes a context that takes the errors raised inside: `nullcontext` lets them pass, a collecting one stores them."""


@dataclass(frozen=True)
class Check[Subject]:
    """One entry of a list of checks."""

    name: str
    run: Callable[[Subject], None]
    """Raises an MkdError; may also store in the subject what later checks read."""
    needs: tuple[str, ...] = ()
    """Names of earlier checks without which this one is meaningless."""


def run_checks[Subject](
    checks: Sequence[Check[Subject]], subject: Subject, sink: Sink = nullcontext, without: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Run checks in their order, each in a context of `sink`.

    Args:
        checks: the list.
        subject: what is checked.
        sink: a collecting one also skips each check that needs one which did not pass. By default the first error is
            raised.
        without: names of checks that are skipped as if they had failed.

    Returns:
        Names of the checks that passed.
    """
    names = {check.name for check in checks}
    passed: set[str] = set()
    for check in checks:
        if check.name in without or not passed.issuperset(names.intersection(check.needs)):
            continue
        with sink():
            check.run(subject)
            passed.add(check.name)
    return frozenset(passed)
