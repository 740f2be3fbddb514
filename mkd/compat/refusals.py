"""Megatron's own checks, whose errors become those of mkd."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from mkd.errors import MkdConfigError


@contextmanager
def megatron_refusals(what: str) -> Iterator[None]:
    """Turn errors of Megatron's checks into one line.

    Some of its assertions have no message: the asserted condition names the flag.

    Args:
        what: what is refused, such as "the flags".

    Raises:
        MkdConfigError: Megatron has raised an error.
    """
    try:
        yield
    except (AssertionError, ValueError) as error:
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
        raise MkdConfigError(f"megatron refuses {what}: {' '.join(reason.split())}") from error
