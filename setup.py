"""Build step beside pyproject.toml: stores the commit of the checkout in the wheel, for `mkd.utils.commit`."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).parent / "mkd"
COMMIT = runpy.run_path(str(PACKAGE / "utils" / "commit.py"))


class BuildWithCommit(build_py):
    """Adds the commit to the built package; an editable installation reads it from its checkout."""

    def run(self) -> None:
        """See setuptools."""
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / "mkd" / COMMIT["FILE"]).write_text(COMMIT["commit_of"](PACKAGE))


setup(cmdclass={"build_py": BuildWithCommit})
