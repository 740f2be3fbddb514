"""benchmarks/bench_teacher.py runs small on CPU: every row is in the table."""

import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "benchmarks"


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import bench_teacher

    file = tmp_path / "teacher.json"
    assert bench_teacher.main(["--small", "--warmup", "1", "--iterations", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["teacher"], row["together"]) for row in rows] == [
        (name, together) for name in ("tiny", "tiny, own layout") for together in (1, 2, 4)
    ]
    assert all(row["ms"] > 0 and row["difference"] < 1e-6 for row in rows)
    assert "tiny, own layout | 4 x 16 | 4 | no" in capsys.readouterr().out
