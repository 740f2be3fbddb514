"""Files of hidden states that a vLLM server writes to a folder which it shares with the job; the server is not trusted.

vLLM's `ExampleHiddenStatesConnector` writes one safetensors file per request, `<id of the request>.safetensors`, after
it has sent the answer. It holds a lock on `<name>.lock` from before the answer until the file is complete.
"""

import fcntl
import math
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.safetensors_files import read_tensors
from mkd.errors import MkdCheckpointError, MkdNodeError, MkdNumericError, MkdTeacherError
from mkd.teacher.inference.http import ServerLost

FLAG = "--kd-teacher-states-dir"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.safetensors")
_STATES, _IDS = "hidden_states", "token_ids"
_HEADER_BYTES = 1 << 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_MOST_GIVEN_UP = 1024
"""Requests whose late files are removed."""
_SWEEP_S = 1.0
"""Seconds between two searches for them at least."""


class StatesMissing(ServerLost):
    """The file of an answer is not there, not complete or locked: the text may be sent again."""


@dataclass(frozen=True)
class StatesFolder:
    """The folder of --kd-teacher-states-dir. Files outside of it are never opened, whatever path a server names."""

    folder: Path
    wait_s: float
    """Longest wait for the file of an answer."""
    _given_up: "_LateFiles" = field(default_factory=lambda: _LateFiles(), compare=False, repr=False)

    def check(self) -> None:
        """Refuse a folder in which files cannot be read and removed.

        Raises:
            MkdNodeError: it is missing, or not writable.
        """
        if not self.folder.is_dir():
            raise MkdNodeError(
                f"{FLAG} {self.folder} is not a folder: create it, and start vLLM with it as shared_storage_path"
            )
        if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            raise MkdNodeError(
                f"{FLAG} {self.folder} cannot be read and written by this user: files of hidden states are removed "
                "there when they have been read"
            )

    def take(self, named: Any, request: str, text: Sequence[int], width: int, origin: str) -> Tensor:
        """Read the file of an answer and remove it.

        Args:
            named: the path in the answer; its last part is used.
            request: the id of the request, which is part of the names of its files.
            text: the token ids that were sent.
            width: numbers per token.
            origin: the server, for messages.

        Returns:
            [n, width] in the server's dtype.

        Raises:
            StatesMissing: the file does not come, or is not complete.
            MkdNumericError: a number is not finite.
            MkdTeacherError: anything else is wrong with it.
        """
        name = _name_in(named, origin)
        try:
            self._await_lock(name, origin)
            states = _check(self._read(name, len(text), width, origin), text, width, f"{origin}: {FLAG} {name}")
        except StatesMissing:
            if request in name:  # not the file of another job
                self._remove(name, origin, is_read=False)
                self.give_up(request)
            raise
        self._remove(name, origin)
        self._given_up.remove_from(self.folder)
        return states

    def give_up(self, request: str) -> None:
        """The files of a request are not waited for any longer: those that the server still writes are removed."""
        self._given_up.add(request)

    def _await_lock(self, name: str, origin: str) -> None:
        """Return when the server has released the lock of a file."""
        ends, pause = time.monotonic() + self.wait_s, _FIRST_PAUSE_S
        while (problem := self._problem_of_lock(f"{name}.lock", origin)) is not None:
            if time.monotonic() > ends:
                raise StatesMissing(f"{origin}: {problem} after {self.wait_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _problem_of_lock(self, name: str, origin: str) -> str | None:
        """The reason to wait for a lock; None if it is free."""
        try:
            with self._opened(name, origin) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return f"there is no {name} in {FLAG} {self.folder}, to which it should write (its shared_storage_path)"
        except BlockingIOError:
            return f"{FLAG} {self.folder}/{name} is still locked"
        except OSError as error:
            raise MkdTeacherError(
                f"{FLAG} {self.folder}: locks of files do not work there ({error.strerror or error}): give a folder on "
                "a file system with flock"
            ) from None
        return None

    def _read(self, name: str, length: int, width: int, origin: str) -> dict[str, Tensor]:
        """The tensors of a file."""
        path, most = self.folder / name, _HEADER_BYTES + length * (4 * width + 8)
        try:
            with self._opened(name, origin) as file:
                if (size := os.fstat(file).st_size) > most:
                    raise MkdTeacherError(
                        f"{origin}: {FLAG} {name} has {size:,} bytes, more than one state of {width} numbers for each "
                        f"of {length} tokens: it must extract one layer, of the model in --kd-teacher-head-hf"
                    )
                content = bytearray(size)
                with os.fdopen(os.dup(file), "rb", buffering=0) as raw:
                    view, done = memoryview(content), 0
                    while done < size and (count := raw.readinto(view[done:])):
                        done += count
        except FileNotFoundError:
            raise StatesMissing(
                f"{origin}: it released the lock of {path} without writing it: is the disk full?"
            ) from None
        except OSError as error:
            raise StatesMissing(f"{origin}: {path} cannot be read ({error.strerror or error})") from None
        try:
            return read_tensors(content, path, FLAG, _HEADER_BYTES)
        except MkdCheckpointError as error:
            raise StatesMissing(f"{error}: is the disk full?") from None

    @contextmanager
    def _opened(self, name: str, origin: str) -> Iterator[int]:
        """Open a regular file of the folder. Links are not followed."""
        path = self.folder / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise MkdTeacherError(
                f"{origin}: {path} cannot be opened ({error.strerror}); a link is not followed"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise MkdTeacherError(f"{origin}: {path} is not a regular file")
            yield file
        finally:
            os.close(file)

    def _remove(self, name: str, origin: str, *, is_read: bool = True) -> None:
        try:
            for each in (name, f"{name}.lock"):
                with suppress(FileNotFoundError):
                    os.unlink(self.folder / each)
        except OSError as error:
            if is_read:
                raise MkdTeacherError(
                    f"{origin}: {self.folder / name} cannot be removed ({error.strerror or error}): this user needs "
                    f"the right to remove files from {FLAG}"
                ) from None


class _LateFiles:
    """Requests whose answer did not come in time, although the server may still write it. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, None] = OrderedDict()
        self._searched_at = -math.inf

    def add(self, request: str) -> None:
        """Remove the files of a request from now on."""
        with self._lock:
            self._requests[request] = None
            if len(self._requests) > _MOST_GIVEN_UP:
                self._requests.popitem(last=False)

    def remove_from(self, folder: Path) -> None:
        """Remove the files that the server has written meanwhile. A file that it still writes has no name afterward."""
        with self._lock:
            if not self._requests or time.monotonic() - self._searched_at < _SWEEP_S:
                return
            self._searched_at = time.monotonic()
            try:
                names = os.listdir(folder)
            except OSError:  # the next file that is read from it ends the job, with the reason
                return
            for path in [folder / name for name in names if _NAME.fullmatch(name)]:
                request = next((one for one in self._requests if one in path.name), None)
                if request is not None:
                    del self._requests[request]
                    for each in (path, path.with_name(f"{path.name}.lock")):
                        with suppress(OSError):
                            each.unlink()


def _name_in(named: Any, origin: str) -> str:
    name = named.rpartition("/")[2] if isinstance(named, str) else ""
    if not _NAME.fullmatch(name):
        raise MkdTeacherError(f"{origin} names the file of hidden states {named!r:.200}, which is not a name of vLLM")
    return name


def _check(tensors: dict[str, Tensor], text: Sequence[int], width: int, origin: str) -> Tensor:
    """The states in the tensors of a file."""
    if set(tensors) != {_STATES, _IDS}:
        raise MkdTeacherError(f"{origin} has the tensors {sorted(tensors)[:4]!r:.200}, not {_STATES} and {_IDS}")
    states, ids = tensors[_STATES], tensors[_IDS]
    if ids.dtype != torch.int64 or ids.tolist() != list(text):
        raise MkdTeacherError(
            f"{origin} has states of another text ({list(ids.shape)} token ids; {len(text)} were sent): is it the file "
            "of another request, or does the server change texts?"
        )
    if states.dtype not in DTYPES or tuple(states.shape) != (len(text), 1, width):
        raise MkdTeacherError(
            f"{origin} has states of shape {list(states.shape)} in {str(states.dtype).removeprefix('torch.')}; "
            f"{[len(text), 1, width]} in float32, bfloat16 or float16 are needed: it must extract one layer, of the "
            "model in --kd-teacher-head-hf"
        )
    states = states[:, 0]
    largest = states.abs().amax(dim=1)
    if not bool(largest.isfinite().all()):
        raise MkdNumericError(
            f"{origin} has hidden states that are not finite: the teacher's weights are damaged, or it overflows in "
            "its precision"
        )
    is_zero = largest == 0.0
    # The first tokens may have zeros, if their embeddings do; later ones attend to others.
    if len(is_zero) > 1 and bool(is_zero[-1] | (is_zero > is_zero.int().cummin(0).values).any()):
        # Where locks do not reach the server, a file may be read while its parts are written, in any order.
        raise StatesMissing(
            f"{origin} has zeros for {int(is_zero.sum())} tokens: it is not complete; does its file system share locks "
            "(flock)?"
        )
    return states
