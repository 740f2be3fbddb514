"""Rank-0 progress and plan output of a job that fills a cache."""

from typing import Any

from mkd.job.cache_build.job import CacheJob
from mkd.job.cache_build.texts import Ledger
from mkd.utils.logging import logger
from mkd.utils.progress import Progress

PRINT_SECONDS = 10.0
"""Shortest time between two lines."""


class CacheProgress:
    """Progress lines, printed by rank 0."""

    def __init__(self, total: int, stored: int) -> None:
        """Print the size of the job.

        Args:
            total: rows to read.
            stored: segments that are in the folder already.
        """
        self._rows = Progress(total, PRINT_SECONDS)
        _print(f"{total:,} rows to read; {stored:,} segments are stored already")

    def rows(self, count: int, ledger: Ledger) -> None:
        """Add `count` finished rows; prints a line at most every `PRINT_SECONDS`."""
        rows = self._rows
        rows.advance(count)
        if not ledger.tokens:  # all stored already: the time of skipping is not teacher time
            rows.restart_clock()
        if not rows.line_is_due():
            return
        line = f"{rows.done:,} of {rows.total:,} rows ({rows.done / rows.total:.1%})"
        if (left := rows.seconds_left) is not None:
            line += f", {ledger.tokens:,} tokens, {ledger.tokens / rows.seconds:,.0f} tokens/s, ETA {_clock(left)}"
        _print(line)

    def end(self, ledger: Ledger) -> None:
        """Print what was added."""
        seconds = self._rows.seconds
        rate = f", {ledger.tokens / seconds:,.0f} tokens/s" if ledger.tokens else ""
        _print(f"{ledger.segments:,} segments of {ledger.tokens:,} tokens added in {_clock(seconds)}{rate}")


def _print(text: str) -> None:
    logger.info(f"cache      {text}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def print_cache_plan(job: CacheJob) -> None:
    """Print a summary of the job on rank 0, before any weight is loaded."""
    args, meta = job.args, job.meta
    what = f"{meta.samples} samples" if meta.samples else f"the {meta.top_k} most probable tokens, values {meta.values}"
    layout = f"TP {args.tensor_model_parallel_size}, PP {args.pipeline_model_parallel_size}"
    layout += f", CP {args.context_parallel_size}, DP {args.data_parallel_size}"
    plan: dict[str, Any] = {
        "teacher": job.teacher,
        "out": f"{job.out}: {what}, {meta.records.dtype.itemsize} bytes per token, at temperature "
        + ", ".join(f"{t:g}" for t in meta.temperatures),
        "layout": layout,
        "vocabulary": f"{meta.true_vocab} tokens, padded to {args.padded_vocab_size}",
    }
    if not job.data.has_own_rows:
        plan["keys"] = (
            "rows are concatenated documents: only training with the same data, --seed, --seq-length, --split and "
            "number of samples reads the same rows and finds them in the cache; chats and --kd-packing best_fit do "
            "not depend on these"
        )
    for name, text in plan.items():
        logger.info(f"{name:10s} {text}")
