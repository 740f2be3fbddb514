"""Versions of the tokens of chat files that a data cache keeps: older ones were made without reading some keys."""

import re
from collections.abc import Iterable

from mkd.data.sources.conversation import LEARN_KEYS, is_near_content

_KEYS_SINCE = {
    2: re.compile(rb'"(?:' + "|".join((*LEARN_KEYS, "train_detail")).encode() + rb')"\s*:'),
    3: re.compile(rb'"(?:system|history)"\s*:'),
}
"""Version of stored sets -> keys that versions before it did not read, or not in every form."""
_MISNAMED_SINCE = 4
"""Version of stored sets before which a text under another key than content was an empty message."""
FACTS_VERSION = max(*_KEYS_SINCE, _MISNAMED_SINCE)
"""Version of a stored set. The tokens of a file without the keys above are the same in all versions, and are found
under the same name."""


def mentions_newer_keys(lines: Iterable[bytes], version: int) -> bool:
    """True if a line has a key, perhaps inside a text, that a stored set of a version was made without reading."""
    unread = [keys for since, keys in _KEYS_SINCE.items() if since > version]
    are_misnamed = _MisnamedContent() if version < _MISNAMED_SINCE else None
    return any(
        any(keys.search(line) for keys in unread) or (are_misnamed is not None and are_misnamed(line)) for line in lines
    )


class _MisnamedContent:
    """Finds keys that are near content, and compares each name once. ShareGPT's `value` is beside `from`."""

    _KEY = re.compile(rb'"([^"\\\s]{1,64})"\s*:')

    def __init__(self) -> None:
        self._known = {b"content"}

    def __call__(self, line: bytes) -> bool:
        keys = set(self._KEY.findall(line))
        new = keys - self._known - ({b"value"} if b"from" in keys else set())
        self._known |= new
        return any(is_near_content(key.decode(errors="replace")) for key in new)
