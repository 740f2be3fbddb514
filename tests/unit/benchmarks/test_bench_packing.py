"""The benchmark of packing: its text, and the arithmetic of a row of its table."""

import argparse
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_packing  # noqa: E402

ARGS = argparse.Namespace(
    seq_length=100, micro_batch_size=2, global_batch_size=4, steps=7, small=True, samples=20, vocab=300
)


def test_text_is_the_documentation_of_the_standard_library() -> None:
    texts = list(islice(bench_packing.conversations(), 400))
    lengths = sorted(len(text["completion"]) for text in texts)
    assert len(texts) == 400 and lengths[-1] > 10 * lengths[len(lengths) // 2]
    assert any("abstract" in text["completion"] and text["prompt"].startswith("What does ") for text in texts)


def test_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(command: list[str], **options: object) -> subprocess.CompletedProcess:
        assert command[command.index("--kd-packing") + 1] == "best_fit"
        lines = [
            {"iteration": i, "loss": 1.0, "tokens_per_s": rate, "peak_memory_gib": 2.5}
            for i, rate in enumerate([1, 1, 1, 1, 1, 800, 1200], start=1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in [*lines, {"iteration": 7, "valid_ce": 1.0}])
        Path(command[command.index("--kd-metrics-file") + 1]).write_text(text)
        said = "mkd: data       training   chat.jsonl: 20 samples in 5 rows, 90.0% of them tokens; 9 rows wanted"
        return subprocess.CompletedProcess(command, 0, stdout=said, stderr="")

    monkeypatch.setattr(bench_packing.subprocess, "run", train)
    row = bench_packing.run("packed", bench_packing.CASES["packed"], tmp_path, tmp_path / "chat.jsonl", ARGS)
    assert row["step_ms"] == pytest.approx(400.0) and row["real_tokens_per_s"] == pytest.approx(900.0)
    assert row["filled"] == pytest.approx(0.9) and row["peak_gib"] == 2.5


def test_failed_run_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="pretrain_kd.py: error: no")
    monkeypatch.setattr(bench_packing.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"(?s)padded: .*error: no"):
        bench_packing.run("padded", bench_packing.CASES["padded"], tmp_path, tmp_path / "chat.jsonl", ARGS)
