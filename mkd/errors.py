"""Errors that a user can correct, one class per thing to change.

Every message has the problem, the value, and the flag or file to change. Internal invariants are `assert`s; these
classes are for input.
"""

import errno
import re
import sys
from collections.abc import Callable

_LINE_ENDS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+\s*")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change how a terminal shows a text, besides tab and line ends, and those that no file can hold."""
_BYTES = range(0xDC80, 0xDD00)
"""Code points for the bytes of a name that is not UTF-8; the byte is the last one."""
_LONGEST = 8_000
"""Characters of a message at most."""
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def visible(text: str) -> str:
    """The text with characters that control a terminal, and bytes that are not UTF-8, as escapes such as \\x1b; tabs
    and line ends stay.

    For texts that quote files and names of files, which other people made.
    """
    return _CONTROL.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code & 0xFF:02x}" if code in _BYTES else character.encode("unicode_escape").decode()


class MkdError(Exception):
    """Base of all errors that a user can correct. The message is one line, whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        own = _shortened(_own_part(str(message), type(self).__name__))
        super().__init__(visible(_LINE_ENDS.sub(" ", own)))


class MkdConfigError(MkdError):
    """A flag, or flags that contradict each other."""


class MkdPackageError(MkdConfigError):
    """A flag that needs a package which is not installed in this Python."""


class MkdNodeError(MkdConfigError):
    """A path or port of a flag that this node cannot use as it must: another node may, where a file system is mounted
    or writable."""


class MkdDataError(MkdError):
    """Training or validation data that is missing, empty or does not fit the model."""


class MkdCheckpointError(MkdError):
    """A Hugging Face folder or a Megatron checkpoint that is missing, incomplete or of another model."""


class MkdCacheError(MkdError):
    """A cache of targets, or a projection, that is missing, incomplete or of another teacher or tokenizer."""


class MkdTeacherError(MkdError):
    """A server that is not a teacher service or an inference server, has another model than expected, or refuses the
    connection or a request."""


class MkdTeacherTimeout(MkdTeacherError):
    """A teacher service or an inference server that does not answer; the same command may find it later."""

    status = 75
    """Exit status of a job that it ends (EX_TEMPFAIL)."""


class MkdNumericError(MkdError):
    """Non-finite numbers in a model's outputs or gradients."""


def is_correctable(error: BaseException) -> bool:
    """True for errors of the user and of the file system, which are reported in one line.

    Errors of the file system name a file, which a user can look at (it is missing, a link in a circle, not readable,
    its name is too long), or are those of a full or read-only disk.
    """
    if isinstance(error, OSError):
        return error.filename is not None or error.errno in _FULL_DISK
    return isinstance(error, MkdError)


def _shortened(message: str) -> str:
    """The message without its middle, if it quotes a word of megabytes."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2]} ... ({len(message):,} characters) ... {message[-_LONGEST // 4 :]}"


def _own_part(message: str, name: str) -> str:
    """The message without the traceback that torch puts before it when it passes an error on from a loader's worker."""
    if not message.startswith(f"Caught {name} in "):
        return message
    return message.rpartition(f"{name}: ")[2].strip()


def exit_status(command: Callable[[], object], report: Callable[[str], object] | None = None) -> int:
    """Run a tool's command; the exit status is 0, or 1 after an error of the user, printed as one line on stderr.

    Args:
        command: what to run.
        report: called with the line that is printed.
    """
    try:
        command()
    except (MkdError, OSError) as error:
        line = f"error: {error}"
        print(line, file=sys.stderr)
        if report is not None:
            report(line)
        return 1
    return 0
