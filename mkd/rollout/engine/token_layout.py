"""The tensor-parallel layout of forward passes over one token per text.

Sequence parallelism splits activations, of which such a pass has few, and needs two collectives where one all-reduce
does. It also forks the state of the random number generator, which a CUDA graph cannot capture. Hence all ranks compute
all texts in these passes. Where such a pass is a CUDA graph, one kernel sums an output of a layer over the ranks, adds
it to the residual stream and computes the next norm, see `BlockSums`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model
from torch import nn

from mkd.distributed.groups import Groups
from mkd.distributed.peer_memory import NoPeerMemory, peer_memory
from mkd.rollout.engine.block_sum import BlockSums, reason_against_block_sums
from mkd.rollout.engine.captured_step import can_capture
from mkd.utils.logging import logger

_SEQUENCE_PARALLEL = (
    "sequence_parallel",
    "_sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)
"""Attributes of modules and of their configurations that are True under sequence parallelism."""
_OF_THE_CLASS = object()
"""Value of an attribute that the owner does not have itself."""
_MOST_RANKS = 2
"""Ranks of `BlockSums`; more have not been measured."""
_MOST_TEXTS, _MOST_VALUES = 512, 1 << 20
"""Texts of a pass, and values of an output. Each text is a program that waits for the same one of the other rank, and
all programs must be on the GPU at once; those of wider models need more registers. Up to 256 x 2048 was measured."""


@dataclass(frozen=True)
class TokenLayout:
    """Attributes of the model chunks that are different in these passes."""

    changes: tuple[tuple[Any, str, Any], ...] = ()
    """(owner, attribute, its value in these passes)."""

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], groups: Groups, slots: int) -> "TokenLayout":
        """The layout of a student. Collective over the tensor-parallel ranks.

        Experts keep theirs: under tensor parallelism, dispatchers split the tokens by sequence parallelism. So do
        layers whose communication Transformer Engine overlaps with products, in buffers of their own.

        Args:
            chunks: its model chunks on this rank.
            groups: its layout.
            slots: texts of a pass.
        """
        sums: tuple[tuple[Any, str, Any], ...] = ()
        if can_capture(chunks, groups):
            (chunk,) = unwrap_model(list(chunks))
            sums = tuple(_block_sums(chunk, groups, slots))
        config = get_model_config(chunks[0])
        if groups.tp.size() == 1 or config.num_moe_experts or config.tp_comm_overlap:
            return cls(sums)
        modules = [module for chunk in chunks for module in chunk.modules()]
        configs = {id(one.config): one.config for one in modules if hasattr(one, "config")}
        owners = (*modules, *configs.values())
        sequence_parallel = [
            (one, name) for one in owners for name in _SEQUENCE_PARALLEL if vars(one).get(name) is True
        ]
        return cls((*sums, *((one, name, False) for one, name in sequence_parallel)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute in this layout inside the `with` block."""
        before = [(owner, name, vars(owner).get(name, _OF_THE_CLASS)) for owner, name, _ in self.changes]
        for owner, name, value in self.changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                if value is _OF_THE_CLASS:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


def _block_sums(chunk: nn.Module, groups: Groups, slots: int) -> Iterable[tuple[nn.Module, str, Any]]:
    """The changes of `BlockSums`; none, and the reason in the log, where the collectives remain."""
    config, tp = chunk.config, groups.tp
    shape, dtype = (slots, config.hidden_size), config.params_dtype
    if tp.size() > _MOST_RANKS:
        reason = f"{tp.size()} ranks"
    elif tp.size() > 1 and (slots > _MOST_TEXTS or slots * config.hidden_size > _MOST_VALUES):
        reason = f"{slots} texts at once, of {config.hidden_size} values"
    else:
        reason = reason_against_block_sums(chunk)
    if reason is None:
        try:
            memory = peer_memory(tp, BlockSums.bytes_of(shape, dtype, tp.size()))
            return BlockSums.of(memory, tp.rank(), shape, dtype).changes(chunk)
        except NoPeerMemory as error:
            reason = str(error)
    if tp.size() > 1:
        _report(reason)
    return ()


@cache
def _report(reason: str) -> None:
    logger.info("rollouts   sums over tensor-parallel ranks through NCCL: %s", reason)
