"""A teacher whose answers are read from a cache; none of its weights is in memory."""

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
from mkd.teacher.cache.lookup import Lookup, Missing
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.interface import TopKSignal

_Identity = tuple[tuple[bytes, ...], tuple[int, ...], bytes]
"""What decides what is read for a microbatch: its texts, where they stand, and the KD mask."""


class CachedTeacher:
    """Reads on one rank of each group of tensor-parallel ranks of the last stage, which hands on to the others.

    A thread reads the microbatches that come after those of a step while the step is computed.
    """

    def __init__(self, answers: CacheReader, groups: Groups, *, tolerant: bool, row_length: int) -> None:
        """Collective over all ranks.

        Args:
            answers: what is read.
            groups: the student's layout.
            tolerant: segments that the cache does not have are left out of the divergence; otherwise they are an error.
            row_length: tokens of a row, for messages.
        """
        self._answers, self._groups, self._tolerant, self._row_length = answers, groups, tolerant, row_length
        self._reads = groups.is_last_stage and groups.tp.rank() == 0
        # Ranks agree on the host: waiting for a device here would leave it without work.
        self._agreement = dist.new_group(backend="gloo")
        self._require_same_everywhere()
        self._thread = ThreadPoolExecutor(1, "teacher cache") if self._reads else None
        self._step: dict[_Identity, Tensor] = {}
        self._words: list[Tensor] = []
        self._ahead: dict[bool, Future[dict[_Identity, Tensor]]] = {}
        self.missing = 0
        """Segments of the last step, over all ranks, that had something to learn and are not in the cache."""

    def _require_same_everywhere(self) -> None:
        """Ranks that find other segments would learn on other tokens."""
        store = self._answers.store
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(digests, torch.tensor([store.digest()]), group=self._agreement)
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise MkdCacheError(
                    f"{store.flag} {store.folder} has other texts on rank {rank} than on rank 0: is it the same folder "
                    "on every node, and complete?"
                )

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return False

    def fingerprint(self) -> str:
        return self._answers.store.meta.teacher

    def facts(self) -> dict[str, float]:
        """See `Teacher.facts`."""
        return {"kd_missing": float(self.missing)} if self._tolerant else {}

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`. Collective over all ranks.

        Raises:
            MkdCacheError: on all ranks, when a segment is missing and may not be, or what is stored is damaged.
        """
        failure, missing, lookups = None, [], []
        try:
            lookups = [Lookup.of(batch, self._answers.store) for batch in batches]
            missing = [segment for lookup in lookups for segment in lookup.missing]
            if missing and not self._tolerant:
                raise MkdCacheError(self._text(missing, batches, upcoming.evaluating))
            if self._reads:
                self._collect(lookups, upcoming.evaluating)
        except MkdCacheError as error:
            failure = str(error)
        self.missing = self._agree(failure, len(missing))
        if self._reads:
            self._look_ahead(upcoming)
        return [lookup.batch for lookup in lookups]

    def _text(self, missing: Sequence[Missing], batches: Sequence[KDBatch], evaluating: bool) -> str:
        store, others, batch = self._answers.store, len(missing) - 1, batches[missing[0].microbatch]
        row_length = batch.tokens.shape[1] if batch.packed is None else self._row_length
        step = "step of an evaluation" if evaluating else "step"
        return (
            f"{store.flag} {store.folder} does not have {missing[0].text(row_length)}"
            + (f", nor {others} more of this {step}" if others else f" of this {step}")
            + f": write this data too (tools/cache_teacher.py{', with more --eval-iters' * evaluating}), or give "
            "--kd-cache-missing ce_only"
        )

    def _collect(self, lookups: Sequence[Lookup], evaluating: bool) -> None:
        """Have the words of all microbatches of the step, which were read ahead or are read now."""
        known = dict(self._step)  # a step that megatron runs again
        if (ahead := self._ahead.pop(evaluating, None)) is not None:
            with suppress(MkdError):  # reading it again, for the step that needs it, tells
                known |= ahead.result()
        step = {}
        for lookup in lookups:
            identity = _identity(lookup.batch)
            step[identity] = known[identity] if identity in known else self._read(lookup)
        self._step, self._words = step, [step[_identity(lookup.batch)] for lookup in lookups]

    def _read(self, lookup: Lookup) -> Tensor:
        cp = self._groups.cp
        return self._answers.read(lookup.request(cp.rank(), cp.size()))

    def _look_ahead(self, upcoming: Lookahead) -> None:
        make = upcoming.fetch()

        def read() -> dict[_Identity, Tensor]:
            lookups = [Lookup.of(batch, self._answers.store) for batch in make()]
            return {_identity(lookup.batch): self._read(lookup) for lookup in lookups}

        self._ahead[upcoming.evaluating] = self._thread.submit(read)

    def _agree(self, failure: str | None, missing: int) -> int:
        """Fail on all ranks if one does; else the number of missing segments over all ranks, each counted once."""
        is_first = not (self._groups.mp.rank() or self._groups.cp.rank())
        counts = torch.tensor([failure is not None, missing if is_first else 0], dtype=torch.int64)
        dist.all_reduce(counts, group=self._agreement)
        if counts[0]:
            failures: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure, group=self._agreement)
            raise MkdCacheError(next(text for text in failures if text is not None))
        return int(counts[1])

    def signals(self, batches: Sequence[KDBatch]) -> list[TopKSignal]:
        """See `Teacher.signals`: of microbatches that `prepare` has seen. Collective over the tensor-parallel ranks."""
        return [self._signal(batch) for batch in batches] if self._groups.is_last_stage else []

    def _signal(self, batch: KDBatch) -> TopKSignal:
        if self._reads:
            words = self._words[batch.number].pin_memory().to("cuda", non_blocking=True)
        else:
            words = torch.empty(*batch.tokens.shape, self._answers.width, dtype=torch.int32, device="cuda")
        if self._groups.tp.size() > 1:
            dist.broadcast(words, group=self._groups.tp, group_src=0)
        return self._answers.signal(words)


def _identity(batch: KDBatch) -> _Identity:
    return batch.segment_hashes, batch.bounds, batch.kd_mask.numpy().tobytes()
