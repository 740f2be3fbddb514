"""What a user can get wrong, one class for each thing they would go and change.

Every message says what is wrong, the value that was seen, and the flag or file to change. Internal invariants stay
`assert`s; these classes are for input.
"""

import errno
import sys
from collections.abc import Callable

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Of an OSError that a user can mend, wherever it comes up: no space, no more quota, mounted read-only."""


class MkdError(Exception):
    """Base of all errors that a user can mend."""


class MkdConfigError(MkdError):
    """A flag, or flags that contradict each other."""


class MkdPackageError(MkdConfigError):
    """A flag that needs a package which is not installed in this Python."""


class MkdDataError(MkdError):
    """Training or validation data that is missing, empty or does not fit the model."""


class MkdCheckpointError(MkdError):
    """A Hugging Face folder or a Megatron checkpoint that is missing, torn or of another model."""


class MkdCacheError(MkdError):
    """A cache of teacher signals, or a projection, that is missing, torn or of another teacher or tokenizer."""


class MkdNumericError(MkdError):
    """Numbers that are not finite, in what a model computes."""


def exit_status(command: Callable[[], object]) -> int:
    """Run a tool's command: its exit status is 0, or 1 after a user's error, told in one line on stderr."""
    try:
        command()
    except (MkdError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
