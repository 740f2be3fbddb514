"""The one reader of JSON: bounded in size and depth, from regular files only, and never blocked.

Every failure is a ValueError or an OSError: nesting that would exhaust the stack, numbers of more digits than Python
converts, bytes that are not UTF-8. A named pipe or a device is refused before it is read, since a read of it may wait
forever or never end.
"""

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from mkd.utils.lfs_pointers import LFS_HINT, LFS_POINTER

MOST_BYTES = 64 << 20
"""Largest JSON text. The largest tokenizer.json has about 35 MB; a text of empty lists grows 20-fold in memory."""
_DEPTH = 100
"""Deepest nesting. Parsers of other libraries end at 128."""


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a regular file, too large or too deep, or not JSON.
    """
    content = read_regular(path, MOST_BYTES)
    if content.startswith(LFS_POINTER):
        raise ValueError(LFS_HINT)
    return parse_json(content.decode())


def parse_json(text: str | bytes, most: int = MOST_BYTES, unique: bool = False) -> Any:
    """The value of a JSON text of at most `most` characters.

    Args:
        text: the JSON text.
        most: see above.
        unique: refuse a key that an object has twice, of which the last one would count.

    Raises:
        ValueError: it is too large or too deep, or not JSON; a json.JSONDecodeError if it names a position.
    """
    if len(text) > most:
        raise ValueError(f"{len(text):,} characters; at most {most:,} are read")
    try:
        value = json.loads(text, object_pairs_hook=_with_unique_keys if unique else None)
    except RecursionError:
        raise ValueError(f"JSON is nested deeper than {_DEPTH} levels") from None
    if _is_deep(value):
        raise ValueError(f"JSON is nested deeper than {_DEPTH} levels")
    return value


def read_regular(path: Path, at_most: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a regular file, or larger than `at_most` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        # Not up to the limit at once: Python takes memory for as much as it is asked to read.
        parts, left = [], at_most + 1 if state.st_size <= at_most else 0
        while left > 0 and (part := file.read(min(left, state.st_size + (1 << 12)))):
            parts.append(part)
            left -= len(part)
    content = b"".join(parts)
    if left <= 0:
        raise ValueError(f"it has {state.st_size:,} bytes; at most {at_most:,} are read")
    return content


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in an object")
    return found


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(_DEPTH):
        level = [
            item
            for part in level
            for item in (part.values() if isinstance(part, dict) else part)
            if isinstance(item, (list, dict))
        ]
        if not level:
            return False
    return True
