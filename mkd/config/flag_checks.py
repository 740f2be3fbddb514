"""Flags on a command line and in files: names that no flag has, and values of another type."""

from argparse import ArgumentParser, BooleanOptionalAction, _HelpAction
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from mkd.config.command_words import read_settings
from mkd.config.kd_fields import kd_flags
from mkd.config.run_file import Setting
from mkd.errors import MkdConfigError

KD = "--kd-"


def check_kd_names(argv: Sequence[str]) -> None:
    """Refuse names that no --kd-* flag has, on a command line or in the files that it names, before anything that takes
    seconds is imported.

    Raises:
        MkdConfigError: names the flag, and one that is similar; or a file cannot be read.
    """
    known = kd_flags()
    for setting in read_settings(argv):
        if setting.flag.startswith(KD) and setting.flag not in known:
            raise _unknown_name(setting, known)
    for word in argv:
        flag = word.partition("=")[0]
        if flag.startswith(KD) and flag not in known:
            raise unknown_words(word, known, "mkd train --help-all lists all flags")


def unknown_words(words: str, flags: Iterable[str], otherwise: str) -> MkdConfigError:
    """The error of words on the command line, the first of which is no flag.

    Args:
        words: the words.
        flags: all flags.
        otherwise: the hint where none of them is similar.
    """
    flag = words.split()[0].split("=")[0]
    # Megatron's flags are many and resemble one another.
    guesses = get_close_matches(flag, flags, n=1, cutoff=0.65 if flag.startswith(KD) else 0.8)
    hint = f"did you mean {guesses[0]}?" if guesses else otherwise
    return MkdConfigError(f"unknown on the command line: {words} ({hint})")


def _unknown_name(setting: Setting, flags: Iterable[str]) -> MkdConfigError:
    name = setting.flag.removeprefix("--")
    return MkdConfigError(f"{setting.where}: no flag is named {name} ({_suggestion(name, flags)})")


def check_settings(settings: Sequence[Setting], parser: ArgumentParser) -> None:
    """Check flags and types of values.

    Raises:
        MkdConfigError: a key is not a flag, or its value does not fit.
    """
    for setting in settings:
        check_setting(setting, parser)


def check_setting(setting: Setting, parser: ArgumentParser) -> None:
    """Check one setting; `parser.error` must raise MkdConfigError."""
    action, name = parser._option_string_actions.get(setting.flag), setting.flag.removeprefix("--")
    if action is None or isinstance(action, _HelpAction):
        raise _unknown_name(setting, parser._option_string_actions)
    takes_none = action.nargs == 0
    if isinstance(setting.value, bool):
        if setting.value is False and isinstance(action, BooleanOptionalAction):
            raise MkdConfigError(f"{setting.where}: {name} is false; write no-{name}: true")
        if not takes_none and action.nargs != "?":
            text = str(setting.value).lower()
            raise MkdConfigError(f'{setting.where}: {name} takes a value, not {text}; write "{text}" if that is meant')
    elif takes_none:
        raise MkdConfigError(f"{setting.where}: {name} is {' '.join(setting.value)}; it takes true or false")
    elif action.nargs is None and len(setting.value) != 1:
        raise MkdConfigError(f"{setting.where}: {name} has {len(setting.value)} values; it takes one")
    try:
        parser.parse_known_args(setting.words)
    except MkdConfigError as error:
        raise MkdConfigError(f"{setting.where}: {error}") from None


def _suggestion(name: str, flags: Iterable[str]) -> str:
    flags = set(flags) - {"--help", "-h"}
    for prefix in ("kd-", "no-"):
        if f"--{prefix}{name}" in flags:
            return f"did you mean {prefix}{name}?"
    guesses = get_close_matches(f"--{name}", flags, n=1, cutoff=0.6)
    return f"did you mean {guesses[0].removeprefix('--')}?" if guesses else "mkd train --help-all lists all flags"
