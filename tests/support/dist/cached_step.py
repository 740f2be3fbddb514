"""Writing caches of the small models' teacher, and steps that read them, for workers of the pool."""

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any
from unittest.mock import patch

from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.data.microbatches import next_microbatches
from mkd.distributed.groups import Groups
from mkd.job.cache_build.targets import TargetBuilder
from mkd.teacher.cache.lookup import Lookup, ReadRequest
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.cache.teacher import CachedTeacher
from mkd.teacher.cache.writer import StoreWriter
from mkd.teacher.online import OnlineTeacher
from tests.support.dist.kd_samples import VOCAB, microbatches
from tests.support.dist.kd_step import Layout, Models, build_teacher, kd_step, parallel_state


def meta_of(top_k: int, values: str = "fp32", samples: int = 0) -> CacheMeta:
    """Metadata of the caches of these tests."""
    return CacheMeta("t" * 32, None, VOCAB, top_k, values, (1.0, 2.0), samples, "float32")


def write_cache(
    rank: int, world_size: int, layout: Layout, models: Models, metas: dict[str, CacheMeta], leave_out: Sequence[bytes]
) -> None:
    """Run the teacher over all samples of the first step, in the microbatches of this layout.

    Args:
        rank, world_size: of the pool.
        layout: data-parallel ranks write to the same folders.
        models: the teacher and the samples.
        metas: folder -> its metadata.
        leave_out: keys of segments that are not written.
    """
    with parallel_state(layout):
        groups = Groups.from_megatron()
        teacher = build_teacher(layout, models, groups)
        samples = microbatches(models.data, layout.cp, layout.mbs, groups.dp.rank(), groups.dp.size())
        batches = [KDBatch.from_sample(sample, VOCAB) for sample in samples]
        signals = teacher.signals([batch.on_rank(groups.cp) for batch in batches])
        for folder, meta in metas.items():
            builder = TargetBuilder(meta, groups, sequence_parallel=layout.sp)
            tables = [builder.table(signal, batch) for signal, batch in zip(signals, batches, strict=False)]
            if builder.collects:
                _store(Path(folder), builder, tables, batches, leave_out)


def _store(
    folder: Path, builder: TargetBuilder, tables: list, batches: list[KDBatch], leave_out: Sequence[bytes]
) -> None:
    writer = StoreWriter(folder, builder.meta, shard_bytes=4000)
    for table, batch in zip(tables, batches, strict=True):
        for key, positions in batch.segments():
            if key not in leave_out:
                writer.add(key, builder.token_targets(table[positions]))
    writer.flush()


def _part_of_first_rank(right: Any) -> Any:
    def wrong(self: Lookup, cp_rank: int, cp_size: int) -> ReadRequest:
        return right(self, 0, cp_size)

    return wrong


def _masks_unchanged(right: Any) -> Any:
    def wrong(self: CachedTeacher, batches: Sequence[KDBatch], upcoming: Any) -> list[KDBatch]:
        right(self, batches, upcoming)
        return list(batches)

    return wrong


FAULTS = {
    "every rank reads the part of context-parallel rank 0": (Lookup, "request", _part_of_first_rank),
    "missing texts stay in the divergence": (CachedTeacher, "prepare", _masks_unchanged),
}


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Plant one of `FAULTS`."""
    owner, attribute, make = FAULTS[name]
    with patch.object(owner, attribute, make(getattr(owner, attribute))):
        yield


def reads_of_steps(rank: int, world_size: int, cache: str) -> dict[str, Any]:
    """Two steps of four microbatches, the second one twice, as Megatron repeats a step: the threads that read each, and
    the samples of each step."""
    with parallel_state(Layout()):
        models, groups = Models(data="padded", top_k=4, cache=cache), Groups.from_megatron()
        teacher = build_teacher(Layout(), models, groups)
        samples = microbatches("padded", 1, 2, 0, 1)
        source, seen, threads = RerunDataIterator(iter(samples)), [], []

        def read(self: CacheReader, request: ReadRequest) -> Tensor:
            threads[-1].append(current_thread() is main_thread())
            return right(self, request)

        right = CacheReader.read
        machine = patch("megatron.core.rerun_state_machine.get_rerun_state_machine", lambda: _Recording())
        with patch.object(CacheReader, "read", read), machine:
            for step in range(3):
                if step == 2:
                    source.rewind()
                else:
                    source.advance()
                threads.append([])
                batches = next_microbatches(source, 4, VOCAB)
                seen.append([batch.segment_hashes for batch in batches])
                teacher.prepare(batches, Lookahead(source, 4, VOCAB, None, evaluating=False))
                wait(teacher._prefetched.values())
        keys = [KDBatch.from_sample(sample, VOCAB).segment_hashes for sample in samples]
        return {"threads": threads, "seen": seen, "expected": [keys[:4], keys[4:], keys[4:]]}


class _Recording:
    def get_mode(self) -> RerunMode:
        return RerunMode.VALIDATE_RESULTS


def cached_step(rank: int, world_size: int, layout: Layout, models: Models, planted: str | None) -> dict[str, Any]:
    """`kd_step`, with a fault."""
    with fault(planted) if planted else nullcontext():
        return kd_step(rank, world_size, layout, models)


def step_without_texts(
    rank: int, world_size: int, layout: Layout, models: Models, left_out: Sequence[bytes]
) -> dict[str, Any]:
    """`kd_step` with a model that has no targets for some texts."""

    def prepare(self: OnlineTeacher, batches: Sequence[KDBatch], upcoming: Any) -> list[KDBatch]:
        changed = []
        for batch in batches:
            mask = batch.kd_mask.clone()
            for key, places in batch.segments():
                if key in left_out:
                    mask.view(-1)[places] = 0.0
            changed.append(replace(batch, kd_mask=mask))
        return changed

    with patch.object(OnlineTeacher, "prepare", prepare):
        return kd_step(rank, world_size, layout, models)
