"""A package that is not installed, as one line in place of a traceback: mostly the environment is not active."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def needs_packages() -> Iterator[None]:
    """Imports of a command inside.

    Raises:
        SystemExit: with status 1, after one line on stderr, if a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "mkd"):
            raise
        print(
            f"{Path(sys.argv[0]).name}: error: the package {package} is not installed in {sys.executable}: activate "
            "mkd's environment (source .venv/bin/activate), or run pip install . in the checkout of mkd",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
