"""Read rate and size of a teacher cache, and the time that training waits for it.

    python benchmarks/bench_cache.py --json cache.json
    python benchmarks/bench_cache.py --metrics RUN/metrics.jsonl

The first command reads random targets from a folder that it has just written: tokens per second of one process, from
the file to the tensors of a step, with the checksum of every record. The second prints the waiting time of a finished
run with --kd-teacher-cache from its metrics.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkd.data.batch import KDBatch
from mkd.teacher.cache.lookup import Lookup
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.cache.record_format import TokenTargets, Values
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter

FRACTION = 2
"""One measurement reads top_k // FRACTION of the stored columns, to measure the cost of selecting them."""


def random_targets(tokens: int, vocab: int, top_k: int, rng: np.random.Generator) -> TokenTargets:
    """Targets with decreasing logits and a few percent of the mass in the tail."""
    strides = rng.integers(1, vocab // top_k, (tokens, top_k))
    logits = -np.sort(rng.exponential(4.0, (tokens, top_k)), axis=1).astype(np.float32)
    top_lse = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return TokenTargets(
        ids=(np.cumsum(strides, axis=1) - 1).astype(np.int32),
        logits=logits,
        lse=top_lse + np.float32(0.03),
        label_log_prob=np.full(tokens, -2.0, dtype=np.float32),
    )


def write(folder: Path, args: argparse.Namespace, values: Values) -> list[KDBatch]:
    """Write a cache of some rows; returns the microbatches that read it, one row each."""
    meta = CacheMeta("made up", None, args.vocab, args.top_k, values, samples=args.top_k if values == "counts" else 0)
    writer, rng, batches = StoreWriter(folder, meta), np.random.default_rng(0), []
    for _ in range(args.rows):
        tokens = torch.from_numpy(rng.integers(0, args.vocab, (1, args.row_length)))
        sample = {"tokens": tokens, "labels": tokens, "position_ids": tokens, "loss_mask": torch.ones(tokens.shape)}
        batches.append(KDBatch.from_sample(sample, args.vocab))
        writer.add(batches[-1].segment_hashes[0], random_targets(args.row_length, args.vocab, args.top_k, rng))
    writer.flush()
    return batches


def measure(args: argparse.Namespace, values: Values, top_k: int) -> dict[str, Any]:
    """Measure one row of the table."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "cache"
        batches = write(folder, args, values)
        store = TeacherStore(folder, "--cache")
        reader, seconds, busy = CacheReader(store, top_k, 1.0), [], []
        for _ in range(args.repeats):
            began, worked = time.perf_counter(), time.process_time()
            for batch in batches:
                reader.read(Lookup.of(batch, store).request(0, 1))
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
        size = sum(shard.path.stat().st_size for shard in store.shards)
    return {
        "format": values,
        "stored": args.top_k,
        "read": top_k,
        "bytes_a_token": size / store.tokens,
        "tokens_per_s": store.tokens / statistics.median(seconds),
        "tokens_per_cpu_s": store.tokens / statistics.median(busy),
    }


def waiting(file: Path) -> dict[str, float]:
    """Waiting time and step time of a run, summed over its steps after the first three."""
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if "cache_s" in line][3:]
    if not lines:
        raise ValueError(f"--metrics {file} has no steps with cache_s after the third")
    waited, steps = (sum(line[name] for line in lines) for name in ("cache_s", "step_s"))
    return {"steps": len(lines), "waited_s": waited, "step_s": steps, "share": waited / steps}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--top-k", type=int, default=64, help="stored columns per token")
    parser.add_argument("--row-length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions; the median is reported")
    parser.add_argument("--metrics", type=Path, help="metrics file of a run: print its waiting time instead")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, as a test")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.smoke:
        args.vocab, args.top_k, args.row_length, args.rows, args.repeats = 307, 8, 20, 2, 2
    if args.metrics is not None:
        found: Any = waiting(args.metrics)
        print(f"{found['steps']} steps, {found['share']:.1%} of their time waiting for the cache")
    else:
        kinds = [("log12", args.top_k), ("log12", args.top_k // FRACTION), ("fp32", args.top_k), ("counts", args.top_k)]
        found = [measure(args, *kind) for kind in kinds]
        print("| format | stored | read | bytes per token | tokens/s | tokens/s of CPU |\n|---|---|---|---|---|---|")
        for row in found:
            print(
                f"| {row['format']} | {row['stored']} | {row['read']} | {row['bytes_a_token']:.1f} | "
                f"{row['tokens_per_s']:,.0f} | {row['tokens_per_cpu_s']:,.0f} |"
            )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
