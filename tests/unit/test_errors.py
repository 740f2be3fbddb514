"""mkd/errors.py: messages are one line."""

import pytest

from mkd.errors import MkdCheckpointError, MkdDataError


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n  ", "\u2028", "\v", "\x85"])
def test_a_quoted_message_of_several_lines_is_one_line(end: str) -> None:
    quoted = f"Couldn't deserialize: TProtocolException{end}(Exceeded size limit)"
    error = MkdDataError(f"chats.parquet cannot be read ({quoted}): it is damaged")
    assert len(str(error).splitlines()) == 1
    assert str(error).endswith("TProtocolException (Exceeded size limit)): it is damaged")


def test_a_path_keeps_its_spaces() -> None:
    assert str(MkdCheckpointError("--load a  b\tc: missing")) == "--load a  b\tc: missing"
