"""The commit of mkd's code. setup.py runs this file before a package is installed: standard library only."""

import subprocess
from pathlib import Path

FILE = "commit.txt"
"""File of an installed package, stored when it was built; a checkout has none."""


def commit_of(package: Path) -> str:
    """Commit of a package's checkout, with "+" if its files differ from it; of an installation that of its build.

    A host that runs an installed package may have no git.
    """
    # Without locks, which `describe --dirty` takes in any case: a job that is killed meanwhile would leave index.lock
    # in the checkout, beside which no commit works.
    git = ["git", "--no-optional-locks", "-C", str(package), "-c", "core.fsmonitor=false"]
    try:
        ours = subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=10)
        if ours.returncode == 0:  # else the environment lies inside a checkout of something else
            describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*"]
            changed = [*git, "status", "--porcelain", "--untracked-files=no"]
            commit, files = (
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
                for command in (describe, changed)
            )
            return commit + "+" * bool(files)
    except (OSError, subprocess.SubprocessError):
        pass  # no git, or a damaged checkout, which has no stored commit either
    stored = package / FILE
    return stored.read_text() if stored.is_file() else "unknown"
