"""Errors that a user can correct, one class per thing to change.

Every message has the problem, the value, and the flag or file to change. Internal invariants are `assert`s; these
classes are for input.
"""

import errno
import sys
from collections.abc import Callable

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""errno of each OSError that a user can correct, wherever it occurs: no space, no quota, mounted read-only."""


class MkdError(Exception):
    """Base of all errors that a user can correct."""


class MkdConfigError(MkdError):
    """A flag, or flags that contradict each other."""


class MkdPackageError(MkdConfigError):
    """A flag that needs a package which is not installed in this Python."""


class MkdDataError(MkdError):
    """Training or validation data that is missing, empty or does not fit the model."""


class MkdCheckpointError(MkdError):
    """A Hugging Face folder or a Megatron checkpoint that is missing, incomplete or of another model."""


class MkdCacheError(MkdError):
    """A cache of targets, or a projection, that is missing, incomplete or of another teacher or tokenizer."""


class MkdNumericError(MkdError):
    """Non-finite numbers in a model's outputs or gradients."""


def exit_status(command: Callable[[], object]) -> int:
    """Run a tool's command; the exit status is 0, or 1 after an error of the user, printed as one line on stderr."""
    try:
        command()
    except (MkdError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
