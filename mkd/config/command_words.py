"""The words of a command line and of the files that it names, before they are parsed."""

from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mkd.config.run_file import FLAG, Setting, read_file


def files_named(argv: Sequence[str]) -> list[str]:
    """The files that --kd-config names on a command line."""
    found, reading = [], False
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            reading = flag == FLAG
            if reading and equals:
                found.append(value)
        elif reading:
            found.append(word)
    return found


def read_settings(argv: Sequence[str]) -> list[Setting]:
    """The settings in the files that a command line names, in their order; of several for one flag the last.

    Raises:
        MkdConfigError: a file cannot be read, or does not hold flags.
    """
    found: dict[str, Setting] = {}
    for file in files_named(argv):
        for setting in read_file(file):
            found.pop(setting.flag, None)
            found[setting.flag] = setting
    return list(found.values())


def words_of(settings: Iterable[Setting]) -> list[str]:
    """The settings as words of a command line. They precede its own, which therefore win."""
    return [word for setting in settings for word in setting.words]


def without_files(argv: Sequence[str]) -> list[str]:
    """A command line without --kd-config and the files that it names."""
    kept, dropping = [], False
    for word in argv:
        if word.startswith("--"):
            dropping = word.partition("=")[0] == FLAG
        if not dropping:
            kept.append(word)
    return kept


def given_words(argv: Sequence[str]) -> list[str]:
    """The words of the files that a command line names, and its own, without --kd-config.

    Raises:
        MkdConfigError: see `read_settings`.
    """
    return [*words_of(read_settings(argv)), *without_files(argv)]


def last_value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag that has one value, before the words are parsed; None if it is not given."""
    found = None
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found or None


def given_flags(argv: Sequence[str], parser: ArgumentParser) -> dict[str, bool | str | list[str]]:
    """The flags of a valid command line: name without dashes -> True or values; of repeated ones the last."""
    actions = parser._option_string_actions
    found: dict[str, tuple[str, list[str]]] = {}
    current: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag in actions:
            current = [value] if equals else []
            # One entry per argument: of --foo and --no-foo the last counts.
            found.pop(actions[flag].dest, None)
            found[actions[flag].dest] = (flag.removeprefix("--"), current)
        else:
            current.append(word)
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in found.values()}
