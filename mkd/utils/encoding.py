"""The words of a command line are UTF-8 text.

Names of files may hold other bytes, which Python keeps as surrogates. Libraries that get such a name (tokenizers,
TensorBoard) fail with it after minutes, and run.yaml, JSON and HTML cannot hold it.
"""

from collections.abc import Iterable

from mkd.errors import MkdConfigError


def is_text(word: str) -> bool:
    """False for a word with bytes that are not UTF-8, or with half a surrogate pair of a YAML file."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_text(words: Iterable[str]) -> None:
    """Refuse a command line with a word that is not UTF-8 text.

    Raises:
        MkdConfigError: names the flag before the word, and the word.
    """
    flag = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag, word = name, value if equals else word
        if not is_text(word):
            raise MkdConfigError(f"{flag} {word}: this is not UTF-8 text; rename the file or folder".strip())
