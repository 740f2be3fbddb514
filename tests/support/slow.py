"""Cases of a table that run with `-m slow` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(names: Iterable[str]) -> list[Any]:
    """Parameters of `pytest.mark.parametrize` with the marker `slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]
