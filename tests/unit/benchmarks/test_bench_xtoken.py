"""benchmarks/bench_xtoken.py runs small on CPU: every row is in the table, and errors are errors."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from pytest import CaptureFixture, MonkeyPatch

TOOLS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import bench_xtoken

        return bench_xtoken


def test_rows(tool: ModuleType, tmp_path: Path, capsys: CaptureFixture) -> None:
    file = tmp_path / "xtoken.json"
    assert tool.main(["--smoke", "--losses", "jsd", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["one tokenizer", "partition_kl", "p_kl", "gold", "gold_relaxed"]
    assert all(row["ms"] > 0 for row in rows)
    out = capsys.readouterr().out
    assert sum(line.startswith("| ") for line in out.splitlines()) == 2 + len(rows) and "40 common" in out


def test_a_row_that_fails(tool: ModuleType, capsys: CaptureFixture, monkeypatch: MonkeyPatch) -> None:
    def out_of_memory(*args: object, **options: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(tool, "xtoken_loss", out_of_memory)
    assert tool.main(["--smoke", "--losses", "jsd", "--kinds", "gold"]) == 1
    assert "not measured: MemoryError: no room" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--kinds", "silver"], ["--losses", "kl"], ["--common", "200000"]])
def test_bad_flags_are_refused(tool: ModuleType, flags: list[str], capsys: CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        tool.main(flags)
    assert exit_.value.code == 2
    assert flags[0] in capsys.readouterr().err
