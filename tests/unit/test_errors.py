"""mkd/errors.py: messages are one line."""

import pytest

from mkd.errors import MkdCheckpointError, MkdDataError, visible


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
