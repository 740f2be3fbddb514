"""mkd/utils/logging.py: which rank prints what, and the log file."""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkd.utils.logging import (
    EVERY_RANK,
    FILE_ONLY,
    WITHOUT_PREFIX,
    close_file,
    log_to_existing_file,
    log_to_file,
    logger,
    set_level,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    set_level("info")
    close_file()


def test_lines_have_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("data\nmore")
    logger.warning("50% full", extra=WITHOUT_PREFIX)
    logger.debug("details")
    assert capsys.readouterr() == ("mkd: data\nmkd: more\n50% full\n", "")


def test_other_ranks_are_silent_unless_a_record_is_for_every_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    logger.error("from rank 0 only")
    logger.info("step", extra=EVERY_RANK)
    assert capsys.readouterr().out == "mkd: step\n"


def test_level(capsys: pytest.CaptureFixture[str]) -> None:
    set_level("warning")
    logger.info("plan")
    logger.warning("damaged")
    set_level("debug")
    logger.debug("details")
    assert capsys.readouterr().out == "mkd: damaged\nmkd: details\n"


def test_disabling_the_logging_of_libraries_does_not_silence_mkd(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    logger.info("plan")
    assert logging.getLogger("mkd") is logger
    assert capsys.readouterr().out == "mkd: plan\n"


def test_file_is_appended_with_time_level_and_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "save" / "mkd.log"
    log_to_file(path)
    assert not path.parent.exists()
    logger.info("plan")
    log_to_file(path)  # as after a restart
    monkeypatch.setenv("RANK", "1")
    logger.info("from rank 0 only")
    logger.warning("one\ntwo", extra=EVERY_RANK | FILE_ONLY)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}"
    expected = ["INFO    rank 0: plan", "WARNING rank 1: one", "WARNING rank 1: two"]
    lines = path.read_text().splitlines()
    assert [re.sub(f"^{time} ", "", line) for line in lines] == expected
    assert all(re.match(time, line) for line in lines)
    assert capsys.readouterr().out == "mkd: plan\n"


def test_only_a_file_that_exists_and_only_from_a_level_on(tmp_path: Path) -> None:
    path = tmp_path / "save" / "mkd.log"
    for name in (path, tmp_path, Path("\0")):
        log_to_existing_file(name, "error")
        logger.error("refused")
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir()
    path.write_text("plan\n")
    log_to_existing_file(path, "error")
    logger.warning("not checked yet")
    logger.error("refused", extra=FILE_ONLY)
    log_to_file(path)
    logger.info("new plan")
    ends = [line.partition("rank 0: ")[2] for line in path.read_text().splitlines()[1:]]
    assert ends == ["refused", "new plan"]


def test_unwritable_file_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    log_to_file(tmp_path / "file" / "mkd.log")
    logger.info("one")
    logger.info("two")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "mkd: one" and out[2:] == ["mkd: two"]
    assert "mkd.log cannot be written" in out[1]


def test_a_pipe_that_nobody_reads_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "mkd.log")
    log_to_file(tmp_path / "mkd.log")
    logger.info("one")
    logger.info("two")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "mkd: one" and out[2:] == ["mkd: two"]
    assert "mkd.log cannot be written" in out[1]
    assert (tmp_path / "mkd.log").is_fifo()


def test_errors_of_stdout_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):
        logger.info("plan")
