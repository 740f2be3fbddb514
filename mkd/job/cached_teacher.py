"""A cache as the teacher of a job: whether its answers are those that the job asks for."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkd.config.kd_config import KDConfig
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError, MkdConfigError
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.cache.store import CacheMeta, TeacherStore
from mkd.teacher.cache.teacher import CachedTeacher


@dataclass(frozen=True)
class CacheSource:
    """What is known of a teacher from a cache of its answers."""

    store: TeacherStore
    origin: str
    """The flag and the folder, for messages."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Nothing: see `TeacherSource`."""

    @classmethod
    def open(cls, path: str, flag: str) -> "CacheSource":
        """Open a folder.

        Raises:
            MkdCacheError: it is no cache, of another version, a shard is missing or torn, or there is none.
        """
        store = TeacherStore(Path(path), flag)
        if not len(store):
            raise MkdCacheError(f"{flag} {path} has no answers yet: write them (tools/cache_teacher.py)")
        return cls(store, f"{flag} {path}")

    @property
    def path(self) -> Path:
        return self.store.folder

    @property
    def meta(self) -> CacheMeta:
        return self.store.meta

    @property
    def vocab_size(self) -> int:
        """See `TeacherSource`."""
        return self.meta.true_vocab

    @property
    def tokenizer_hash(self) -> str | None:
        """See `TeacherSource`."""
        return self.meta.tokenizer

    def fingerprint(self) -> str:
        """Of the teacher that answered."""
        return self.meta.teacher


@dataclass(frozen=True)
class CachedTeacherSpec:
    """Stored answers that fit the job."""

    source: CacheSource
    kd: KDConfig
    row_length: int

    @classmethod
    def of(cls, source: CacheSource, args: Namespace, kd: KDConfig, true_vocab: int) -> "CachedTeacherSpec":
        """See `job_teacher`.

        Raises:
            MkdCacheError: the answers are about other tokens, or to other questions.
            MkdConfigError: a flag asks for more than is stored.
        """
        meta, origin = source.meta, source.origin
        if meta.true_vocab != true_vocab:
            raise MkdCacheError(
                f"{origin} has answers about a vocabulary of {meta.true_vocab} tokens, student and teacher of this job "
                f"share {true_vocab}: write it anew with this job's flags"
            )
        positions = "document" if args.reset_position_ids else "segment"
        if meta.positions != positions:
            raise MkdCacheError(
                f"{origin} was written with positions that begin anew with each {meta.positions}, in this job they do "
                f"so with each {positions}: {'leave out' if args.reset_position_ids else 'give'} --reset-position-ids"
            )
        if meta.labels_only and kd.mask == "all":
            raise MkdConfigError(f"--kd-mask is all, but {origin} has answers to supervised tokens only: leave it out")
        if meta.samples:
            _check_draws(source, kd)
        else:
            _check_most_probable(source, kd)
        return cls(source, kd, args.seq_length)

    def __str__(self) -> str:
        store, meta = self.source.store, self.source.meta
        return (
            f"cache {store.folder} of {meta.teacher} ({meta.teacher_dtype}): {store.tokens} tokens in {len(store)} "
            f"texts, {_stored(meta)}, {meta.values}, T = {', '.join(f'{t:g}' for t in meta.temperatures)}, "
            f"{meta.records.dtype.itemsize} bytes a token"
        )

    @property
    def sources(self) -> list[CacheSource]:
        """See `JobTeacher`."""
        return [self.source]

    @property
    def models(self) -> list[Namespace]:
        """No model runs: see `JobTeacher`."""
        return []

    @property
    def looks_at(self) -> str:
        """See `JobTeacher`."""
        meta = self.source.meta
        if meta.samples:
            return f"{meta.samples} draws from the teacher"
        return f"the teacher's {self._top_k} most probable tokens, tail {self.kd.top_k_tail}"

    @property
    def _top_k(self) -> int:
        return self.kd.top_k or self.source.meta.top_k

    def build(self, groups: Groups) -> CachedTeacher:
        """See `JobTeacher`."""
        temperature = self.kd.temperature_over_time.start
        # To renormalize, no sum is needed.
        stored = temperature if temperature in self.source.meta.temperatures else 1.0
        answers = CacheReader(self.source.store, self._top_k, stored)
        tolerant = self.kd.cache_missing == "ce_only"
        return CachedTeacher(answers, groups, tolerant=tolerant, row_length=self.row_length)


def _stored(meta: CacheMeta) -> str:
    return f"{meta.samples} draws" if meta.samples else f"K = {meta.top_k}"


def _check_most_probable(source: CacheSource, kd: KDConfig) -> None:
    meta, origin, temperature = source.meta, source.origin, kd.temperature_over_time
    if kd.top_k is not None and kd.top_k > meta.top_k:
        raise MkdConfigError(
            f"--kd-top-k is {kd.top_k}, but {origin} has {meta.top_k} tokens: at most as many can be looked at"
        )
    if kd.top_k_tail == "renormalize":
        if (kd.top_k or meta.top_k) < 2:
            raise MkdConfigError(f"--kd-top-k-tail is renormalize, which needs two tokens, but {origin} has one")
        return
    if not meta.has_tail:
        raise MkdConfigError(f"--kd-top-k-tail is bucket, but {origin} has no tail: give --kd-top-k-tail renormalize")
    stored = ", ".join(f"{t:g}" for t in meta.temperatures)
    if temperature.start != temperature.end:
        raise MkdConfigError(
            f"--kd-temperature-schedule {kd.temperature_schedule} does not work with {origin}, which has the tail at "
            f"T = {stored} only: give one of these as --kd-temperature, or --kd-top-k-tail renormalize"
        )
    if temperature.start not in meta.temperatures:
        raise MkdConfigError(
            f"--kd-temperature is {temperature.start:g}, but {origin} has the tail at T = {stored}: give one of these, "
            "or --kd-top-k-tail renormalize, or write the cache at this temperature too"
        )


def _check_draws(source: CacheSource, kd: KDConfig) -> None:
    """Draws are of one distribution, and estimate one divergence from it."""
    drawn, origin = source.meta.temperatures[-1], f"{source.origin} has draws from the teacher"
    temperature = kd.temperature_over_time
    if kd.loss != "forward_kl":
        raise MkdConfigError(f"--kd-loss is {kd.loss}, but {origin}, which can serve forward_kl only")
    if kd.top_k is not None:
        raise MkdConfigError(f"--kd-top-k is {kd.top_k}, but {origin}, all of which count: leave it out")
    if kd.top_k_tail != "bucket":
        raise MkdConfigError(f"--kd-top-k-tail is {kd.top_k_tail}, but {origin}, which have no tail: leave it out")
    if temperature.start != drawn or temperature.end != drawn:
        seen = f"--kd-temperature is {temperature.start:g}"
        if temperature.start != temperature.end:
            seen = f"--kd-temperature-schedule is {kd.temperature_schedule}"
        raise MkdConfigError(f"{seen}, but {origin} at T = {drawn:g}: give that temperature")
