"""The tensor-parallel layout of forward passes over one token per text.

Sequence parallelism splits activations, of which such a pass has few, and needs two collectives where one all-reduce
does. It also forks the state of the random number generator, which a CUDA graph cannot capture. Hence all ranks compute
all texts in these passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.utils import get_model_config
from torch import nn

from mkd.distributed.groups import Groups

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

    changes: tuple[tuple[Any, str], ...] = ()
    """(owner, attribute): True elsewhere, False in these passes."""

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], groups: Groups) -> "TokenLayout":
        """The layout of a student.

        Experts keep theirs: under tensor parallelism, dispatchers split the tokens by sequence parallelism. So do
        layers whose communication Transformer Engine overlaps with products, in buffers of their own.

        Args:
            chunks: its model chunks on this rank.
            groups: its layout.
        """
        config = get_model_config(chunks[0])
        if groups.tp.size() == 1 or config.num_moe_experts or config.tp_comm_overlap:
            return cls()
        modules = [module for chunk in chunks for module in chunk.modules()]
        configs = {id(one.config): one.config for one in modules if hasattr(one, "config")}
        owners = (*modules, *configs.values())
        return cls(tuple((one, name) for one in owners for name in _SEQUENCE_PARALLEL if vars(one).get(name) is True))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute in this layout inside the `with` block."""
        for owner, name in self.changes:
            setattr(owner, name, False)
        try:
            yield
        finally:
            for owner, name in self.changes:
                setattr(owner, name, True)
