"""`mkd report`: writes the page, prints its path; an invalid folder is a one-line error."""

import json
from pathlib import Path

import pytest

from mkd.cli import report


def test_the_page_is_written_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": 2.0}) + "\n{broken\n")
    assert report.main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert (
        out.strip() == str(tmp_path / "report.html")
        and err == "report: 1 damaged lines of metrics.jsonl are left out\n"
    )
    first = (tmp_path / "report.html").read_text()
    assert first.startswith("<!DOCTYPE html>")
    assert report.main([str(tmp_path), "--out", str(tmp_path / "new" / "a.html")]) == 0
    assert (tmp_path / "new" / "a.html").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("words", [["absent"], ["."], [".", "--metrics-file", "absent.jsonl"]])
def test_errors_are_one_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "give the" in error
    assert not list(tmp_path.iterdir())
