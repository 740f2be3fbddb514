"""mkd/job/checks.py: the list that a job and the doctor share."""

from mkd.job.checks import CHECKS


def test_names_are_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))


def test_each_check_needs_earlier_ones_only() -> None:
    earlier: set[str] = set()
    for check in CHECKS:
        assert set(check.needs) <= earlier, check.name
        earlier.add(check.name)
