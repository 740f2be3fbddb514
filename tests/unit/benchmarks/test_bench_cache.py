"""benchmarks/bench_cache.py runs small: each format has a row, and a training's waiting is read from its metrics."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_cache


def test_every_format_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert bench_cache.main(["--smoke", "--json", str(tmp_path / "cache.json")]) == 0
    rows = json.loads((tmp_path / "cache.json").read_text())
    assert [(row["format"], row["read"]) for row in rows] == [("log12", 8), ("log12", 4), ("fp32", 8), ("counts", 8)]
    assert all(row["tokens_per_s"] > 0 and row["bytes_a_token"] > 20 for row in rows)
    assert capsys.readouterr().out.count("\n| ") == len(rows)


def test_waiting_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"iteration": i, "cache_s": 9.0 if i < 4 else 0.1, "step_s": 1.0} for i in range(1, 6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"iteration": 5, "valid_ce": 1.0}]))
    assert bench_cache.main(["--metrics", str(file)]) == 0
    assert "2 steps, 10.0% of their time" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no steps with cache_s"):
        bench_cache.waiting(Path(__file__).parent / ".." / "__init__.py")
