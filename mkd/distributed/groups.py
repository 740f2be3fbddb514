"""Process groups of this rank, built once and passed down, so that no other module reads Megatron's globals."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from mkd.compat.parallel_state import parallel_state_of


@dataclass(frozen=True)
class Groups:
    """Groups of one layout on this rank: the student's, unless another one is named."""

    tp: ProcessGroup
    cp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    """Ranks that hold the same weights and different tokens: sums over tokens are reduced here."""
    mp: ProcessGroup
    """The tensor and pipeline ranks of one replica: they read the same tokens."""
    collection: ProcessGroupCollection
    """All of megatron's groups, for the calls that build models and run schedules."""

    @classmethod
    def from_megatron(cls) -> "Groups":
        """Read megatron's global state once, after `initialize_model_parallel`."""
        c = ProcessGroupCollection.use_mpu_process_groups()
        return cls(tp=c.tp, cp=c.cp, pp=c.pp, dp=c.dp, dp_cp=c.dp_cp, mp=c.mp, collection=c)

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def leads_replica(self) -> bool:
        """True on one rank of each replica: tensor- and context-parallel rank 0 of its last stage."""
        return self.is_last_stage and self.tp.rank() == 0 and self.cp.rank() == 0


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of a parallel layout; the remaining factor of the ranks is data parallel."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor-parallel size of each expert."""


@dataclass(frozen=True)
class ParallelLayout:
    """A second parallel layout over the same ranks, in addition to the student's."""

    groups: Groups
    timeout: timedelta
    """Timeout of collectives."""
    _state: dict[str, Any]

    @classmethod
    def create(
        cls, sizes: ParallelSizes, *, cp_levels: Sequence[int] | None = None, timeout_minutes: int = 10
    ) -> "ParallelLayout":
        """Create its groups, in megatron's order of ranks. Collective over all ranks.

        Args:
            sizes: their product must divide the number of ranks.
            cp_levels: Megatron's hierarchical_context_parallel_sizes.
            timeout_minutes: timeout of the groups' collectives.
        """
        state: dict[str, Any] = {}
        with parallel_state_of(state):
            initialize_model_parallel(
                sizes.tp,
                sizes.pp,
                context_parallel_size=sizes.cp,
                hierarchical_context_parallel_sizes=None if cp_levels is None else list(cp_levels),
                expert_model_parallel_size=sizes.ep,
                expert_tensor_parallel_size=sizes.etp,
                distributed_timeout_minutes=timeout_minutes,
                create_gloo_process_groups=False,
            )
            groups = Groups.from_megatron()
        return cls(groups, timedelta(minutes=timeout_minutes), state)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set megatron's global state to this layout inside the `with` block, to build or run a model in it."""
        with parallel_state_of(self._state):
            yield
