"""What workers of the pool say of a teacher in a layout of its own."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder

from mkd.data.lookahead import Lookahead
from mkd.data.batch import next_microbatches
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.models.gpt import gpt_config
from tests.support.dist.kd_samples import VOCAB, microbatches
from tests.support.dist.kd_step import TEACHER, Layout, Models, build_teacher, model_arguments, parallel_state, sharded_tensors
from tests.support.tolerance import GRADIENT, assert_close_norm


def signals_are_alike(rank: int, world_size: int, layout: Layout, models: Models) -> int:
    """Compare the signals of a teacher in its layout with those in the student's on this rank; how many there are."""
    with parallel_state(layout):
        groups = Groups.from_megatron()
        drawn = microbatches(models.data, layout.segment_cp, layout.mbs, groups.dp.rank(), groups.dp.size())
        batches = next_microbatches(iter(drawn), len(drawn), VOCAB)
        seen = []
        for one in (layout, replace(layout, teacher=None)):
            teacher = build_teacher(one, models, groups)
            prepared = teacher.prepare(batches, Lookahead.empty())
            seen.append(teacher.signals([batch.on_rank(groups.cp) for batch in prepared]))
        for number, (apart, alike) in enumerate(zip(*seen, strict=True)):
            assert torch.equal(apart.head, alike.head)
            assert_close_norm(apart.hidden, alike.hidden, GRADIENT, f"hidden states of microbatch {number}")
        return len(seen[0])


def checkpoint_is_whole(rank: int, world_size: int, inside: bool) -> str | None:
    """What megatron says of the parts of a teacher (TP 2, of a student with DP 4) as parts of a checkpoint.

    Args:
        rank, world_size: of the pool.
        inside: whether it is asked while the teacher's layout is active.
    """
    with parallel_state(Layout()):
        own = ParallelLayout.create(ParallelSizes(tp=2))
        config = gpt_config(model_arguments(TEACHER, Layout(tp=2), tied=False))
        with own.active():
            builder = GPTModelBuilder(config)
            (model,) = builder.build_distributed_models(pg_collection=own.groups.collection, wrap_with_ddp=False)
        with own.active() if inside else nullcontext():
            parts = dict(enumerate(sharded_tensors(unwrap_model(model))))
        try:
            validate_sharding_integrity(determine_global_metadata(parts)[1])
        except CheckpointingException as error:
            return str(error)
        return None
