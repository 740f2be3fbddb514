"""Common parts of the sources and specs of teachers whose model does not run on the student's ranks."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkd.config.kd_config import KDConfig

URL_FLAG = "--kd-teacher-url"
WITHOUT_WAITING_S = 10.0
"""Limit for the answer of a service or a server that should be running."""


class SourceAtAddresses:
    """Parts of a `mkd.checkpoint.source.TeacherSource` behind the addresses of --kd-teacher-url."""

    addresses: Sequence[object]
    positions: int | None
    """Tokens of the longest text that the teacher reads; None if unknown."""

    @property
    def origin(self) -> str:
        """See `TeacherSource`."""
        return f"{URL_FLAG} {' '.join(map(str, self.addresses))}"

    @property
    def path(self) -> Path:
        """See `TeacherSource`; for messages, since there is no folder."""
        return Path(str(self.addresses[0]))

    @property
    def architecture(self) -> dict[str, Any]:
        """See `TeacherSource`; the limit of positions is all that matters to a job that does not run the model."""
        return {"max_position_embeddings": self.positions}


class SpecWithoutModel[Source]:
    """Parts of a `mkd.job.teachers.interface.TeacherSpec` without a model."""

    source: Source

    @property
    def sources(self) -> list[Source]:
        """See `TeacherSpec`."""
        return [self.source]

    @property
    def models(self) -> list[Namespace]:
        """See `TeacherSpec`: no model runs on the student's ranks."""
        return []

    @property
    def served(self) -> list[Namespace]:
        """See `TeacherSpec`: the targets of a few tokens are all that is on the student's ranks."""
        return []


def top_k_description(kd: KDConfig) -> str:
    """`TeacherSpec.target_description` of a teacher with the whole vocabulary; empty without --kd-top-k."""
    return "" if kd.top_k is None else f"the teacher's {kd.top_k} most probable tokens, tail {kd.top_k_tail}"
