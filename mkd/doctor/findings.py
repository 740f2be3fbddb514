"""What is wrong and what is doubtful, gathered instead of raised one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mkd.errors import MkdError, MkdPackageError


@dataclass
class Findings:
    """Two lists of sentences, each sentence once."""

    problems: list[str] = field(default_factory=list)
    """Because of which the run would stop."""
    warnings: list[str] = field(default_factory=list)
    elsewhere: bool = False
    """Whether the run is for another machine than this one, so that a package missing here may be there."""

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Remember a user's error as a problem, and go on behind the block."""
        try:
            yield
        except MkdPackageError as error:
            if self.elsewhere:
                self.warning(f"not installed here, where there is no GPU; the machine that trains needs it: {error}")
            else:
                self.problem(str(error))
        except (MkdError, OSError) as error:
            self.problem(str(error))
