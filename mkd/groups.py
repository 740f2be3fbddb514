"""The process groups of this rank, built once and passed down; nothing below reads megatron's globals."""

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Groups:
    """Groups of the student's layout on this rank."""

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
