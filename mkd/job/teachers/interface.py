"""A teacher fitted to its job, before it is built. See mkd.teacher.interface for the chain."""

from argparse import Namespace
from typing import Protocol

from mkd.checkpoint.source import TeacherSource
from mkd.distributed.groups import Groups
from mkd.teacher.interface import Teacher


class TeacherSpec(Protocol):
    """A teacher that fits the job; nothing of it is in memory yet."""

    source: TeacherSource

    @property
    def models(self) -> list[Namespace]:
        """Megatron's arguments of each teacher model that runs; empty for a cache."""
        ...

    @property
    def served(self) -> list[Namespace]:
        """See `Workload.served`."""
        ...

    @property
    def sources(self) -> list[TeacherSource]:
        """One source per teacher whose metrics are reported separately."""
        ...

    @property
    def target_description(self) -> str:
        """Teacher tokens that the divergence covers, for the run summary; empty for the whole vocabulary."""
        ...

    def build(self, groups: Groups) -> Teacher:
        """The teacher on this rank. Collective over all ranks."""
        ...
