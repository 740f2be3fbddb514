"""What is wrong and what is doubtful, gathered instead of raised one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mkd.errors import MkdError


@dataclass
class Findings:
    """Two lists of sentences, each sentence once."""

    problems: list[str] = field(default_factory=list)
    """Because of which the run would stop."""
    warnings: list[str] = field(default_factory=list)

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
        except (MkdError, OSError) as error:
            self.problem(str(error))
