"""Problems and warnings, collected instead of raised one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mkd.errors import MkdError, MkdPackageError


@dataclass
class Findings:
    """Deduplicated problems and warnings."""

    problems: list[str] = field(default_factory=list)
    """Errors that would stop the job."""
    warnings: list[str] = field(default_factory=list)
    elsewhere: bool = False
    """True if the job is for another machine, which may have packages that are missing here."""

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Record a user's error as a problem, and continue after the block."""
        try:
            yield
        except MkdPackageError as error:
            if self.elsewhere:
                self.warning(f"not installed here, where there is no GPU; the machine that trains needs it: {error}")
            else:
                self.problem(str(error))
        except (MkdError, OSError) as error:
            self.problem(str(error))
