"""mkd/errors.py: messages are one line, and which exceptions are reported in one line."""

import errno
import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from mkd.errors import MkdCheckpointError, MkdDataError, is_correctable, visible


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n  ", "\u2028", "\v", "\x85"])
def test_a_quoted_message_of_several_lines_is_one_line(end: str) -> None:
    quoted = f"Couldn't deserialize: TProtocolException{end}(Exceeded size limit)"
    error = MkdDataError(f"chats.parquet cannot be read ({quoted}): it is damaged")
    assert len(str(error).splitlines()) == 1
    assert str(error).endswith("TProtocolException (Exceeded size limit)): it is damaged")


def test_a_path_keeps_its_spaces() -> None:
    assert str(MkdCheckpointError("--load a  b\tc: missing")) == "--load a  b\tc: missing"


def test_quoted_texts_control_no_terminal() -> None:
    """Names in files of others are quoted in messages."""
    error = MkdDataError("key '\x1b]52;c;cm0=\x07\u202etxt' is unknown")
    assert str(error) == "key '\\x1b]52;c;cm0=\\x07\\u202etxt' is unknown"
    assert visible("a\tb\nc") == "a\tb\nc"


def test_names_that_are_not_utf8_can_be_printed_and_written() -> None:
    name = os.fsdecode(b"/data/\xff\xc3\xa9")
    assert str(MkdDataError(f"{name}: missing")) == "/data/\\xffé: missing"
    assert visible("half \ud83d") == "half \\ud83d"


class Damaged(Dataset):
    """A set whose samples cannot be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        try:
            raise ValueError("MkdDataError: inner")
        except ValueError as error:
            raise MkdDataError("--data-path X: document 3 is damaged: make it again") from error


def test_errors_of_loader_workers_have_their_own_text() -> None:
    """torch passes them on with the worker's traceback as a part of the message."""
    with pytest.raises(MkdDataError) as caught:
        next(iter(DataLoader(Damaged(), num_workers=1)))
    assert str(caught.value) == "--data-path X: document 3 is damaged: make it again"


@pytest.mark.parametrize("path", ["x" * 300, "loop/a", "file/a", "missing/a"])
def test_errors_of_the_file_system_name_a_file(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        (tmp_path / path).open("w")
    assert is_correctable(caught.value) and str(tmp_path / path) in str(caught.value)


def test_other_errors_are_reported_with_their_traceback() -> None:
    assert is_correctable(MkdDataError("x")) and is_correctable(OSError(errno.ENOSPC, "full"))
    assert not is_correctable(OSError(errno.EPIPE, "broken")) and not is_correctable(ValueError("x"))


def test_a_quoted_word_of_megabytes_is_cut() -> None:
    text = str(MkdDataError(f"key {'x' * 20_000_000} is unknown: remove it"))
    assert len(text) < 8_000 and text.startswith("key xxx") and text.endswith("xxx is unknown: remove it")
    assert "... (20,000,026 characters) ..." in text
