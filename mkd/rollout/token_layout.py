"""The tensor-parallel layout of forward passes over one token per text.

Sequence parallelism splits activations, of which such a pass has few, and needs two collectives where one all-reduce
does. It also forks the state of the random number generator, which a CUDA graph cannot capture. Hence all ranks compute
all texts in these passes, and small sums go through symmetric memory where the GPUs allow it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import nn

from mkd.distributed.groups import Groups
from mkd.distributed.symmetric_memory import symmetric_group

_SEQUENCE_PARALLEL = (
    "sequence_parallel",
    "_sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)
"""Attributes of modules and of their configurations that are True under sequence parallelism."""


@dataclass(frozen=True)
class TokenLayout:
    """Attributes of the model chunks that are different in these passes."""

    changes: tuple[tuple[Any, str, Any, Any], ...] = ()
    """(owner, attribute, its value, the value in these passes)."""

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], groups: Groups, texts: int) -> "TokenLayout":
        """The layout of a student. Collective over tensor-parallel ranks.

        Experts keep theirs: under tensor parallelism, dispatchers split the tokens by sequence parallelism. So do
        layers whose communication Transformer Engine overlaps with products, in buffers of their own.

        Args:
            chunks: its model chunks on this rank.
            groups: its layout.
            texts: texts of a pass.
        """
        config = get_model_config(chunks[0])
        if groups.tp.size() == 1 or config.num_moe_experts or config.tp_comm_overlap:
            return cls()
        tp = symmetric_group(groups.tp, texts * config.hidden_size * torch.float32.itemsize)
        modules = [module for chunk in chunks for module in chunk.modules()]
        configs = {id(one.config): one.config for one in modules if hasattr(one, "config")}
        changes = []
        for owner in (*modules, *configs.values()):
            for name, value in vars(owner).items():
                if name in _SEQUENCE_PARALLEL and value is True:
                    changes.append((owner, name, value, False))
                elif value is groups.tp and tp is not groups.tp:
                    changes.append((owner, name, value, tp))
        return cls(tuple(changes))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute in this layout inside the `with` block."""
        for owner, name, _, value in self.changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value, _ in self.changes:
                setattr(owner, name, value)
