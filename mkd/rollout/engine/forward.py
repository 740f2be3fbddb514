"""Forward passes of the student outside training, through Megatron's own schedules, and the parts of their outputs on
context- and sequence-parallel ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Without gradients, dropout and Megatron's timers, as in an evaluation; the modes of the chunks are restored."""
    modes = [chunk.training for chunk in chunks]
    config = get_model_config(chunks[0])
    timers, config.timers = config.timers, None
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        config.timers = timers
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)


def run_forward(
    chunks: Sequence[nn.Module],
    groups: Groups,
    forward_step: Callable[[Iterator[Any], nn.Module], tuple[Tensor, None]],
    inputs: Sequence[Any],
    shape: tuple[int, int],
) -> list[Tensor]:
    """The outputs of a forward step over microbatches of one shape.

    Args:
        chunks: the student's model chunks on this rank.
        groups: its layout.
        forward_step: takes an iterator over `inputs` and a model chunk; returns the output and None.
        inputs: one per microbatch.
        shape: rows and tokens of a microbatch, over all context-parallel ranks.

    Returns:
        One output per microbatch on the last pipeline stage, an empty list elsewhere.
    """
    vp = len(chunks) if len(chunks) > 1 else None
    config = get_model_config(chunks[0])
    count, inputs = len(inputs), list(inputs)
    if vp is not None:  # virtual stages compute whole groups of microbatches
        group = config.microbatch_group_size_per_vp_stage or groups.pp.size()
        inputs += inputs[-1:] * (-count % group)
    rows, length = shape
    found = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=vp)(
        forward_step_func=forward_step,
        data_iterator=iter(inputs) if vp is None else [iter(inputs) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(inputs),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=True,
    )
    return found[:count]


def positions_on_rank(hidden: Tensor, groups: Groups, sequence_parallel: bool) -> Tensor:
    """[n] int64 positions in the row of this rank's hidden states [n, ...], on their device."""
    tp, cp = groups.tp, groups.cp
    parts = tp.size() if sequence_parallel else 1
    length = hidden.shape[0] * parts * cp.size()
    own = dual_chunk_positions((0, length), cp.rank(), cp.size())
    return own.chunk(parts)[tp.rank() if sequence_parallel else 0].to(hidden.device)


def sum_of_parts(values: Tensor, groups: Groups, sequence_parallel: bool) -> Tensor:
    """Values [...] of a row, in place: one of the ranks that share the row has each of them, and the others have 0.

    Collective over these ranks.
    """
    for group, is_split in ((groups.tp, sequence_parallel), (groups.cp, True)):
        if is_split and group.size() > 1:
            dist.all_reduce(values, group=group)
    return values
