"""A copy of a folder that is changed and restored many times."""

import os
import shutil
from pathlib import Path


class WorkingCopy:
    """Restores what was changed only: a copy of everything costs as much as a short job."""

    def __init__(self, source: Path, copy: Path) -> None:
        """Args:
        source: the folder; it stays as it is.
        copy: the folder to restore, which is replaced.
        """
        self._source, self._copy = source, copy
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy, symlinks=True)
        self._states = self._seen()

    def restore(self) -> None:
        """Copy files again whose content or names were changed, and remove others."""
        self._copy.mkdir(exist_ok=True)
        seen = self._seen()
        changed = {name for name, state in seen.items() if self._states.get(name) != state}
        for name in sorted(changed, reverse=True):  # the content of a folder before the folder
            path = self._copy / name
            if path.is_dir() and not path.is_symlink():
                if name not in self._states or not (self._source / name).is_dir():
                    shutil.rmtree(path)
            else:
                path.unlink()
        for name in sorted(self._states):
            path = self._copy / name
            if not os.path.lexists(path):
                source = self._source / name
                if source.is_dir() and not source.is_symlink():
                    path.mkdir(parents=True)
                else:
                    shutil.copy2(source, path, follow_symlinks=False)
                self._states[name] = _state(path)

    def _seen(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for folder, folders, files in os.walk(self._copy):
            for name in (*folders, *files):
                path = Path(folder, name)
                found[str(path.relative_to(self._copy))] = _state(path)
        return found


def _state(path: Path) -> tuple[int, ...]:
    """Changes whenever an entry of a folder changes; the content of a folder is not part of it."""
    found = path.lstat()
    if path.is_dir() and not path.is_symlink():
        return (found.st_mode,)
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
