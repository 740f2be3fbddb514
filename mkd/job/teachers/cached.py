"""A cache as the teacher of a job: opening it, and checking that its targets support the flags of the job."""

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mkd.checkpoint.ranks import run_on_all_ranks
from mkd.config.kd_config import KDConfig
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError, MkdConfigError
from mkd.job.teachers.common import SpecWithoutModel
from mkd.job.teachers.inference import known_text_folders
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.teacher import CachedTeacher
from mkd.teacher.inference.known_text import KnownText, KnownTextFile, known_text_of
from mkd.utils.logging import current_rank


def open_cache(path: str, flag: str) -> TeacherStore:
    """Open a cache that has at least one segment.

    Raises:
        MkdCacheError: the folder is not a cache, is empty or of another version, or a shard is missing or truncated.
    """
    store = TeacherStore(Path(path), flag)
    if not len(store):
        raise MkdCacheError(f"{flag} {path} has no cached targets yet: write them (mkd cache)")
    return store


@dataclass(frozen=True)
class CachedTeacherSpec(SpecWithoutModel[TeacherStore]):
    """Cached targets that fit the job."""

    source: TeacherStore
    kd: KDConfig
    row_length: int
    """Tokens per packed row."""
    known: KnownText | None = None
    """By which the server that has answered is recognized; None if no server has."""
    save: Path | None = None
    """Folder that keeps it."""

    @classmethod
    def of(cls, source: TeacherStore, args: Namespace, kd: KDConfig, true_vocab: int) -> "CachedTeacherSpec":
        """See `from_flags.teacher_spec`.

        Raises:
            MkdCacheError: the cache has another vocabulary, or was written with other position ids.
            MkdConfigError: a flag requires more than the cache holds.
            MkdTeacherError: the run that the job continues had a server with other weights.
        """
        meta, origin = source.meta, source.origin
        if meta.true_vocab != true_vocab:
            raise MkdCacheError(
                f"{origin} has targets for a vocabulary of {meta.true_vocab} tokens, student and teacher of this job "
                f"share {true_vocab}: write it again with this job's flags"
            )
        positions = "document" if args.reset_position_ids else "segment"
        if meta.positions != positions:
            remedy = "leave out --reset-position-ids" if args.reset_position_ids else "give --reset-position-ids"
            if args.position_embedding_type != "learned_absolute":  # see check_position_resets
                remedy = "write it again without --reset-position-ids"
            raise MkdCacheError(
                f"{origin} was written with position ids that restart at each {meta.positions}, in this job they "
                f"restart at each {positions}: {remedy}"
            )
        if meta.labels_only and kd.mask == "all":
            raise MkdConfigError(f"--kd-mask is all, but {origin} has targets for supervised tokens only: leave it out")
        if meta.samples:
            _check_sampled(source, kd)
        else:
            _check_top_k(source, kd)
        load, save = known_text_folders(args, kd)
        kept = KnownTextFile(source.flag, source.folder)
        known = known_text_of([kept] if load is None else [kept, KnownTextFile("--load", load)])
        return cls(source, kd, args.seq_length, known, save)

    def __str__(self) -> str:
        store, meta = self.source, self.source.meta
        return (
            f"cache {store.folder} of {meta.teacher} ({meta.teacher_dtype}): {store.tokens} tokens in {len(store)} "
            f"texts, {_stored(meta)}, {meta.values}, T = {', '.join(f'{t:g}' for t in meta.temperatures)}, "
            f"{meta.records.dtype.itemsize} bytes per token"
        )

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        meta = self.source.meta
        if meta.samples:
            return f"{meta.samples} sampled targets per token"
        return f"the teacher's {self._top_k} most probable tokens, tail {self.kd.top_k_tail}"

    @property
    def _top_k(self) -> int:
        return self.kd.top_k or self.source.meta.top_k

    def build(self, groups: Groups) -> CachedTeacher:
        """See `TeacherSpec`."""
        if self.known is not None and self.save is not None:
            file = KnownTextFile("--save", self.save)
            write = partial(file.write, self.known) if current_rank() == 0 else lambda: None
            for problem in run_on_all_ranks(write):
                if problem is not None:
                    raise MkdCacheError(f"--save {self.save} cannot be written: {problem}")
        temperature = self.kd.temperature_over_time.start
        # A renormalized top-k uses no logsumexp, so any stored temperature will do.
        stored = temperature if temperature in self.source.meta.temperatures else 1.0
        reader = CacheReader(self.source, self._top_k, stored)
        tolerant = self.kd.cache_missing == "ce_only"
        return CachedTeacher(reader, groups, tolerant=tolerant, row_length=self.row_length)


def _stored(meta: CacheMeta) -> str:
    return f"{meta.samples} samples" if meta.samples else f"K = {meta.top_k}"


def _check_top_k(source: TeacherStore, kd: KDConfig) -> None:
    meta, origin, temperature = source.meta, source.origin, kd.temperature_over_time
    if kd.top_k is not None and kd.top_k > meta.top_k:
        raise MkdConfigError(
            f"--kd-top-k is {kd.top_k}, but {origin} has {meta.top_k} tokens per position: give that number or less"
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


def _check_sampled(source: TeacherStore, kd: KDConfig) -> None:
    """Sampled targets come from one distribution, and estimate one divergence from it."""
    sampled_at, origin = source.meta.temperatures[-1], f"{source.origin} has sampled targets"
    temperature = kd.temperature_over_time
    if kd.loss != "forward_kl":
        raise MkdConfigError(f"--kd-loss is {kd.loss}, but {origin}, which support forward_kl only")
    if kd.top_k is not None:
        raise MkdConfigError(f"--kd-top-k is {kd.top_k}, but {origin}, which are used as a whole: leave it out")
    if kd.top_k_tail != "bucket":
        raise MkdConfigError(f"--kd-top-k-tail is {kd.top_k_tail}, but {origin}, which have no tail: leave it out")
    if temperature.start != sampled_at or temperature.end != sampled_at:
        seen = f"--kd-temperature is {temperature.start:g}"
        if temperature.start != temperature.end:
            seen = f"--kd-temperature-schedule is {kd.temperature_schedule}"
        raise MkdConfigError(f"{seen}, but {origin} at T = {sampled_at:g}: give that temperature")
