"""A job's claim on a folder in which one job at a time may write.

The job that claimed the folder last holds it: a restarted job must not wait for one that was forgotten, hangs, or whose
host is gone. The earlier job ends before it writes again.
"""

import os
from datetime import datetime
from pathlib import Path
from socket import gethostname
from uuid import uuid4

from mkd.checkpoint.ranks import gather_objects
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import replacing
from mkd.utils.json_files import read_regular

_MOST_BYTES = 1 << 12


class FolderClaim:
    """The claim of this job; used on all ranks, and written by the first one."""

    def __init__(self, file: Path, origin: str) -> None:
        """Nothing is claimed yet.

        Args:
            file: file in the folder that names the job.
            origin: flag and folder, for messages.
        """
        self._file, self._origin = file, origin
        self._name: str | None = None

    @property
    def is_taken(self) -> bool:
        """True if this process has claimed the folder."""
        return self._name is not None

    def take(self) -> None:
        """Claim the folder, which may be absent. Call it on the first rank."""
        now = f"{datetime.now().astimezone():%F %T %z}"
        self._name = f"process {os.getpid()} on {gethostname()}, started {now} ({uuid4().hex[:8]})"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as file:
            file.write(self._name)

    def check(self, then: str) -> None:
        """Check that no other job has claimed the folder since; a file that was removed claims nothing. Collective over
        all ranks.

        Args:
            then: what happens to this job if one has.

        Raises:
            MkdCheckpointError: on all ranks, if one has.
        """
        other = gather_objects(self._other_job() if self.is_taken else None)[0]
        if other is not None:
            raise MkdCheckpointError(
                f"{self._origin}: another job has claimed this folder: {other}. {then}; give each job a folder of its "
                "own"
            )

    def _other_job(self) -> str | None:
        try:
            owner = read_regular(self._file, _MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"{self._file.name} cannot be read ({error})"
        return None if owner == self._name else owner
