"""Lists of checks: a job stops at the first failure, a collecting sink gets all."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mkd.config.check_list import Check, run_checks
from mkd.config.kd_config import FIELD_CHECKS
from mkd.config.kd_fields import KDFields
from mkd.errors import MkdConfigError


def fail(seen: list[str]) -> None:
    seen.append("a")
    raise MkdConfigError("a is wrong")


CHECKS = (
    Check("a", fail),
    Check("b", lambda seen: seen.append("b"), needs=("a",)),
    Check("c", lambda seen: seen.append("c")),
    Check("d", lambda seen: seen.append("d"), needs=("c", "a name of another list")),
)


def test_the_first_failure_is_raised() -> None:
    seen: list[str] = []
    with pytest.raises(MkdConfigError, match="a is wrong"):
        run_checks(CHECKS, seen)
    assert seen == ["a"]


def test_a_sink_gets_all_failures_and_what_needs_them_is_skipped() -> None:
    errors: list[str] = []

    @contextmanager
    def sink() -> Iterator[None]:
        try:
            yield
        except MkdConfigError as error:
            errors.append(str(error))

    seen: list[str] = []
    assert run_checks(CHECKS, seen, sink) == {"c", "d"}
    assert (seen, errors) == (["a", "c", "d"], ["a is wrong"])
    assert run_checks(CHECKS, [], sink, without=frozenset({"a", "c"})) == frozenset()


def test_field_checks_name_fields() -> None:
    known = set(KDFields.__dataclass_fields__)
    assert all(check.fields and set(check.fields) <= known for check in FIELD_CHECKS)
