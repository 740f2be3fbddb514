"""Existing files and folders whose path is spelled like an absent one, for error messages."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

_MOST_NAMES = 2_000
"""Entries of a folder that are compared."""
_CUTOFF = 0.7
"""Least similarity of two names, from 0 to 1."""


def near_path(path: str | os.PathLike, fits: Callable[[Path], bool] = Path.exists) -> Path | None:
    """The path that differs from an absent one in one misspelled name; None if there is none.

    Args:
        path: as given, relative or absolute.
        fits: True for a path that can stand in its place, such as `Path.is_dir`.
    """
    wanted = Path(path)
    absent = wanted
    try:
        while absent != absent.parent and not absent.parent.is_dir():
            absent = absent.parent
        with os.scandir(absent.parent) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES) if entry.name != absent.name]
        near = get_close_matches(absent.name, names, n=3, cutoff=_CUTOFF)
        found = (absent.parent / name / wanted.relative_to(absent) for name in near)
        return next((one for one in found if fits(one)), None)
    except (OSError, ValueError):  # a folder that cannot be listed, or a path that the system refuses
        return None


def near_path_hint(path: str | os.PathLike, fits: Callable[[Path], bool] = Path.exists) -> str:
    """The rest of a message about an absent path: a question with the path of `near_path`; else empty."""
    found = near_path(path, fits)
    return "" if found is None else f"; did you mean {found}?"
