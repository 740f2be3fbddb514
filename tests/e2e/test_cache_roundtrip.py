"""A cache of conversations serves another seed, layout, batch size and packing than it was written with."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.chats import MARKED, chat_tokenizer, write_lines
from tests.support.e2e.small_job import ROOT, Result, SmallJob, make_small_job, run, text
from tests.support.tolerance import FP32

TOP_K = 8
WRITTEN = {
    "--seed": 3,
    "--micro-batch-size": 1,
    "--eval-iters": 3,
    "--train-iters": None,
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
}
ONE_RANK = {"--tensor-model-parallel-size": None, "--pipeline-model-parallel-size": None}
READ = {
    "--seed": 11,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--kd-packing": "best_fit",
    "--kd-packing-multiple": 4,
    "--kd-mask": "all",
}
WITHIN_QUANTIZATION = 1e-3
"""Nats: tolerance of the loss for the 12-bit format."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    job = make_small_job(tmp_path_factory.mktemp("roundtrip"))
    chat_tokenizer(job.student, MARKED)
    chat_tokenizer(job.teacher, MARKED)
    rng, words = random.Random(0), text().split()

    def message(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choices(words, k=rng.randrange(1, 8)))}

    write_lines(job.root / "chats.jsonl", [{"messages": [message("user"), message("assistant")]} for _ in range(60)])
    return job


def flags(job: SmallJob, changes: dict[str, Any]) -> list[str]:
    return job.flags({"--data-path": job.root / "chats.jsonl", "--seq-length": 96, **changes})


def completed(result: Result) -> list[dict]:
    """Metrics of a successful run."""
    assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
    return [line for line in result.metrics if "kd" in line or "valid_kd" in line]


@pytest.fixture(scope="module")
def online(job: SmallJob) -> list[dict]:
    log = job.root / "online.jsonl"
    return completed(run(flags(job, {**READ, "--kd-top-k": TOP_K, "--kd-metrics-file": log})))


@pytest.mark.parametrize(
    ("lossless", "ranks"),
    [(True, 4), (False, 1), pytest.param(False, 4, marks=pytest.mark.slow)],
    ids=["True", "False", "False-four-ranks"],
)
def test_another_layout_seed_batch_and_packing(job: SmallJob, online: list[dict], lossless: bool, ranks: int) -> None:
    folder = job.root / f"cache_{lossless}_{ranks}"
    write, layout = (WRITTEN, {"--context-parallel-size": 2}) if ranks == 4 else (WRITTEN | ONE_RANK, {})
    own = ["--out", str(folder), "--top-k", str(TOP_K), *(["--lossless"] if lossless else [])]
    written = run(["write", *own, "--", *flags(job, write)], ranks, script=ROOT / "tools" / "cache_teacher.py")
    assert written.status == 0, written.output[-3000:] + written.errors[-6000:]
    read = {**READ, **layout, "--kd-teacher-hf": None, "--kd-teacher-cache": folder}
    seen = completed(run(flags(job, {**read, "--kd-metrics-file": Path(f"{folder}.jsonl")}), ranks))
    assert len(seen) == len(online) >= 4
    for line, expected in zip(seen, online, strict=True):
        for name in {"loss", "ce", "kd", "grad_norm", "valid_kd", "valid_ce", "valid_teacher_ce"} & expected.keys():
            bound = {"rel": FP32} if lossless else {"abs": WITHIN_QUANTIZATION}
            assert line[name] == pytest.approx(expected[name], **bound), name
