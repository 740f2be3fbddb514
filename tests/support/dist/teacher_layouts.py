"""Worker functions about a teacher in a layout of its own."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder

from mkd.data.lookahead import Lookahead
from mkd.data.microbatches import next_microbatches
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.models.gpt import gpt_config
from mkd.teacher.resharded import exchange
from tests.support.dist.kd_samples import VOCAB, microbatches
from tests.support.dist.kd_step import (
    TEACHER,
    Layout,
    Models,
    build_teacher,
    model_arguments,
    parallel_state,
    sharded_tensors,
)
from tests.support.tolerance import GRADIENT, assert_close_norm


def compare_signals(rank: int, world_size: int, layout: Layout, models: Models) -> int:
    """Assert that signals of a teacher in its own layout equal those in the student's layout; returns their number."""
    with parallel_state(layout):
        groups = Groups.from_megatron()
        collated = microbatches(models.data, layout.segment_cp, layout.mbs, groups.dp.rank(), groups.dp.size())
        batches = next_microbatches(iter(collated), len(collated), VOCAB)
        seen = []
        for one in (layout, replace(layout, teacher=None)):
            teacher = build_teacher(one, models, groups)
            prepared = teacher.prepare(batches, Lookahead.empty())
            parts = [batch.on_rank(groups.cp) for batch in prepared]
            parts += [batch.with_supervised().on_rank(groups.cp) for batch in prepared]
            seen.append(teacher.signals(parts))
        assert [signal.selected for signal in seen[0]] == [False] * (len(seen[0]) // 2) + [True] * (len(seen[0]) // 2)
        for number, (own, shared) in enumerate(zip(*seen, strict=True)):
            assert torch.equal(own.head, shared.head)
            assert_close_norm(own.hidden, shared.hidden, GRADIENT, f"hidden states of microbatch {number}")
            if own.selected:
                counts = parts[number].supervised.counts(groups.tp.size())
                assert len(own.hidden) == (counts[groups.tp.rank()] if layout.sp else sum(counts))
        return len(seen[0]) // 2


def index_copies(rank: int, world_size: int, layout: Layout, models: Models) -> list[int]:
    """Index tensors that a teacher in its own layout copies to the device in each of three equal steps: twice with all
    tokens, and with supervised ones."""
    with parallel_state(layout), patch.object(exchange, "_on_device", wraps=exchange._on_device) as copy_index:
        groups = Groups.from_megatron()
        collated = microbatches(models.data, layout.segment_cp, layout.mbs, groups.dp.rank(), groups.dp.size())
        batches = next_microbatches(iter(collated), len(collated), VOCAB)
        teacher = build_teacher(layout, models, groups)
        prepared = teacher.prepare(batches, Lookahead.empty())
        counts, found = [], []
        for supervised in (False, False, True):
            parts = [(batch.with_supervised() if supervised else batch).on_rank(groups.cp) for batch in prepared]
            copy_index.reset_mock()
            found.append(teacher.signals(parts))
            counts.append(copy_index.call_count)
        for one, other in zip(*found[:2], strict=True):
            assert torch.equal(one.hidden, other.hidden)
        return counts


def sharding_error(rank: int, world_size: int, inside: bool) -> str | None:
    """Error of Megatron's check of a teacher's sharded tensors (TP 2, with a student at DP 4); None if there is none.

    Args:
        rank, world_size: of the pool.
        inside: check while the teacher's layout is active.
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
