"""The logger of mkd: lines on stdout and a log file in --save, from rank 0 unless a record is marked otherwise.

    from mkd.utils.logging import EVERY_RANK, logger

    logger.info("data       1,000 rows")                # rank 0 prints "mkd: data       1,000 rows"
    logger.warning("no answer", extra=EVERY_RANK)       # printed by whichever rank gets here

Tables and other results of a command are printed, not logged.
"""

import logging
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from mkd.errors import visible

LogLevel = Literal["debug", "info", "warning", "error"]

FILE = "mkd.log"
"""Name of the log file in --save."""
EVERY_RANK: dict[str, Any] = {"every_rank": True}
"""Extra of a record that the calling rank writes, whatever its number."""
WITHOUT_PREFIX: dict[str, Any] = {"without_prefix": True}
"""Extra of a record that is printed without "mkd: "."""
FILE_ONLY: dict[str, Any] = {"file_only": True}
"""Extra of a record that was printed by other means and belongs in the log file too."""


def current_rank() -> int:
    """The rank in the default process group; before it exists, the launcher's RANK, or 0."""
    dist = sys.modules.get("torch.distributed")  # seconds to import, and without it there is no process group
    if dist is not None and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


class _Logger(logging.Logger):
    """A logger that `logging.disable` does not silence; tools call that to silence the libraries that they use."""

    def isEnabledFor(self, level: int) -> bool:
        return level >= self.getEffectiveLevel()


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    return getattr(record, "every_rank", False) or current_rank() == 0


class _Console(logging.StreamHandler):
    """Prints like `print(..., flush=True)`: to the sys.stdout of the moment, and an error is raised."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    def format(self, record: logging.LogRecord) -> str:
        message = visible(record.getMessage())
        if getattr(record, "without_prefix", False):
            return message
        return "\n".join(f"mkd: {line}" for line in message.split("\n"))

    def handleError(self, record: logging.LogRecord) -> None:
        raise


class _File(logging.Handler):
    """Appends lines with time, level and rank.

    The file is opened for each record: several ranks, also of other nodes, append to the same file, and a network file
    system reads its size again when it is opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        time = datetime.fromtimestamp(record.created).astimezone()
        start = f"{time:%Y-%m-%d %H:%M:%S%z} {record.levelname:7s} rank {current_rank()}: "
        text = "".join(f"{start}{line}\n" for line in visible(record.getMessage()).split("\n"))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8", opener=_open_at_once) as file:
                file.write(text)
        except OSError as error:
            logger.removeHandler(self)
            logger.warning(
                f"{self._path} cannot be written ({error}): no more lines are logged there", extra=EVERY_RANK
            )


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a named pipe that nobody reads is an error instead of a wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _create_logger() -> logging.Logger:
    before = logging.getLoggerClass()
    logging.setLoggerClass(_Logger)
    created = logging.getLogger("mkd")
    logging.setLoggerClass(before)
    created.setLevel(logging.INFO)
    created.propagate = False  # megatron adds a handler to the root logger
    created.addFilter(_is_for_this_rank)
    created.addHandler(_Console())
    return created


logger = _create_logger()


def set_level(level: LogLevel) -> None:
    """Drop the lines below a level, on the console and in the file."""
    logger.setLevel(level.upper())


def log_to_file(path: Path, level: LogLevel = "debug") -> None:
    """Also append all further lines of at least a level to a file, which is created with the first line."""
    close_file()
    handler = _File(path)
    handler.setLevel(level.upper())
    logger.addHandler(handler)


def log_to_existing_file(path: Path, level: LogLevel) -> None:
    """As `log_to_file`, if the file exists: for processes and jobs that may end before the run has a log."""
    if os.path.isfile(path):  # Path.is_file raises if a folder cannot be entered
        log_to_file(path, level)


def close_file() -> None:
    """End what `log_to_file` started."""
    for handler in [handler for handler in logger.handlers if isinstance(handler, _File)]:
        logger.removeHandler(handler)
