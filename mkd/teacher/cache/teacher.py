"""The teacher that reads cached targets; no model weights are in memory."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError, MkdError
from mkd.teacher.cache.lookup import Lookup, MissingSegment
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.interface import TopKSignal

_Identity = tuple[tuple[bytes, ...], tuple[int, ...], bytes]
"""Segment keys, segment bounds and KD mask of a microbatch: they determine the records that are read for it."""


class CachedTeacher:
    """Reads on tensor-parallel rank 0 of the last pipeline stage, which broadcasts to the other tensor-parallel ranks.

    A thread reads the microbatches of the next step while a step is computed.
    """

    def __init__(self, reader: CacheReader, groups: Groups, *, tolerant: bool, row_length: int) -> None:
        """Collective over all ranks.

        Args:
            reader: reads the cache.
            groups: the student's layout.
            tolerant: leave segments that are not in the cache out of the divergence; otherwise they are an error.
            row_length: tokens per packed row, for messages.
        """
        self._reader, self._groups, self._tolerant, self._row_length = reader, groups, tolerant, row_length
        self._reads = groups.is_last_stage and groups.tp.rank() == 0
        # On the host: a collective on the device would drain its queue once per step.
        self._host_group = dist.new_group(backend="gloo")
        self._require_same_cache()
        self._thread = ThreadPoolExecutor(1, "teacher cache") if self._reads else None
        self._step: dict[_Identity, Tensor] = {}
        self._words: list[Tensor] = []
        self._prefetched: dict[bool, Future[dict[_Identity, Tensor]]] = {}
        self.missing = 0
        """Segments of the last step, over all ranks, that have tokens in the KD mask and are not in the cache."""

    def _require_same_cache(self) -> None:
        """Ranks with different segments would train on different tokens."""
        store = self._reader.store
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(digests, torch.tensor([store.digest()]), group=self._host_group)
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise MkdCacheError(
                    f"{store.origin} has other texts on rank {rank} than on rank 0: is it the same folder on "
                    "every node, and complete?"
                )

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return False

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`: of the teacher that computed the targets."""
        return self._reader.store.meta.teacher

    def close(self) -> None:
        """See `Teacher.close`: targets that are not read yet are not waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def begins_early(self) -> bool:
        """See `Teacher.begins_early`."""
        return False

    def begin(self, batch: KDBatch) -> None:
        """See `Teacher.begin`."""

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return {"kd_missing": float(self.missing)} if self._tolerant else {}

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`. Collective over all ranks.

        Raises:
            MkdCacheError: on all ranks, if a segment is missing and `tolerant` is not set, or a record is damaged.
        """
        failure, missing, lookups = None, [], []
        try:
            lookups = [Lookup.of(batch, self._reader.store) for batch in batches]
            missing = [segment for lookup in lookups for segment in lookup.missing]
            if missing and not self._tolerant:
                raise MkdCacheError(self._describe(missing, batches, upcoming.evaluating))
            if self._reads:
                self._load(lookups, upcoming.evaluating)
        except MkdCacheError as error:
            failure = str(error)
        self.missing = self._raise_or_count(failure, len(missing))
        if self._reads:
            self._prefetch(upcoming)
        return [lookup.batch for lookup in lookups]

    def _describe(self, missing: Sequence[MissingSegment], batches: Sequence[KDBatch], evaluating: bool) -> str:
        store, more, batch = self._reader.store, len(missing) - 1, batches[missing[0].microbatch]
        row_length = batch.tokens.shape[1] if batch.packed is None else self._row_length
        step = "evaluation step" if evaluating else "step"
        return (
            f"{store.origin} does not have {missing[0].describe(row_length)}"
            + (f", nor {more} more segments of this {step}" if more else f" of this {step}")
            + f": write this data too (mkd cache{', with more --eval-iters' * evaluating}), or give "
            "--kd-cache-missing ce_only"
        )

    def _load(self, lookups: Sequence[Lookup], evaluating: bool) -> None:
        """Set the words of all microbatches of the step, which are prefetched or read now."""
        known = dict(self._step)  # Megatron may run the same step again
        if (prefetched := self._prefetched.pop(evaluating, None)) is not None:
            with suppress(MkdError):  # the step that needs a bad record reads it again, and raises
                known |= prefetched.result()
        step = {}
        for lookup in lookups:
            identity = _identity(lookup.batch)
            step[identity] = known[identity] if identity in known else self._read(lookup)
        self._step, self._words = step, [step[_identity(lookup.batch)] for lookup in lookups]

    def _read(self, lookup: Lookup) -> Tensor:
        cp = self._groups.cp
        return self._reader.read(lookup.request(cp.rank(), cp.size()))

    def _prefetch(self, upcoming: Lookahead) -> None:
        make = upcoming.fetch()

        def read() -> dict[_Identity, Tensor]:
            lookups = [Lookup.of(batch, self._reader.store) for batch in make()]
            return {_identity(lookup.batch): self._read(lookup) for lookup in lookups}

        self._prefetched[upcoming.evaluating] = self._thread.submit(read)

    def _raise_or_count(self, failure: str | None, missing: int) -> int:
        """Raise on all ranks if one has a failure; else the number of missing segments over all ranks, each once."""
        is_first = not (self._groups.mp.rank() or self._groups.cp.rank())
        counts = torch.tensor([failure is not None, missing if is_first else 0], dtype=torch.int64)
        dist.all_reduce(counts, group=self._host_group)
        if counts[0]:
            failures: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure, group=self._host_group)
            raise MkdCacheError(next(text for text in failures if text is not None))
        return int(counts[1])

    def signals(self, batches: Sequence[KDBatch]) -> list[TopKSignal]:
        """See `Teacher.signals`. Collective over the tensor-parallel ranks; `prepare` has had the same microbatches."""
        return [self._signal(batch) for batch in batches] if self._groups.is_last_stage else []

    def _signal(self, batch: KDBatch) -> TopKSignal:
        if self._reads:
            words = self._words[batch.number].pin_memory().to("cuda", non_blocking=True)
        else:
            words = torch.empty(*batch.tokens.shape, self._reader.width, dtype=torch.int32, device="cuda")
        if self._groups.tp.size() > 1:
            dist.broadcast(words, group=self._groups.tp, group_src=0)
        return self._reader.signal(words)


def _identity(batch: KDBatch) -> _Identity:
    return batch.segment_hashes, batch.bounds, batch.kd_mask.numpy().tobytes()
