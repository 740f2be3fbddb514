"""Errors of Megatron's own checks become one line."""

import pytest

from mkd.compat.refusals import megatron_refusals
from mkd.errors import MkdConfigError


def test_a_message_is_kept_in_one_line() -> None:
    with pytest.raises(MkdConfigError, match=r"^megatron refuses the flags: sizes do not divide$"), refusals():
        raise AssertionError("sizes\n   do not divide")


def test_an_error_without_a_message_shows_its_line() -> None:
    with pytest.raises(MkdConfigError, match="refuses the flags: raise AssertionError # of the size"), refusals():
        raise AssertionError  # of the size


def test_other_errors_are_not_touched() -> None:
    with pytest.raises(KeyError), refusals():
        raise KeyError("a fault of the code")


def refusals():
    return megatron_refusals("the flags")
