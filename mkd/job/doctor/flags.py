"""The parts of a command line that can be used although others are refused."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mkd.config.bounds import check_given
from mkd.config.checks.teachers import SOURCES
from mkd.config.command_words import read_settings, without_files
from mkd.config.flag_checks import check_setting
from mkd.config.flags import flag_parser, refuse_contradictions
from mkd.config.kd_config import FIELD_CHECKS, KDConfig
from mkd.config.kd_fields import KDFields
from mkd.job.doctor.findings import Findings

DEFAULTS = {field.name: field.default for field in fields(KDFields)}


def words_with_files(words: Sequence[str], findings: Findings) -> tuple[list[str], set[str] | None]:
    """A command line with the flags of its --kd-config files in place of their names.

    Returns:
        The words, and the flags in files that are left out because each of them is a problem; None if a file cannot
        be read, which is a problem too.
    """
    found: list[str] = []
    refused: set[str] | None = None
    with findings.tolerate():
        parser = flag_parser()
        settings = read_settings(words)
        refused = set()
        for setting in settings:
            refused.add(setting.flag)
            with findings.tolerate():
                check_setting(setting, parser)
                found += setting.words
                refused.discard(setting.flag)
    return [*found, *without_files(words)], refused


def parsable_words(words: Sequence[str], findings: Findings) -> list[str]:
    """The words without flags that do not exist, contradict distillation, cannot be parsed or are out of bounds.

    Each of these becomes a problem and is left out together with its values.
    """
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    parser = flag_parser()
    megatron_flags = [action for action in parser._actions if not action.dest.startswith("kd_")]
    kept = []
    for group in groups:
        with findings.tolerate():
            refuse_contradictions(group)
            args, unknown = parser.parse_known_args(group)
            check_given(megatron_flags, args, group)
            kept += [word for word in group if word not in unknown]
            if unknown:
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return kept


def checked_config(given: Mapping[str, Any], findings: Findings) -> KDConfig | None:
    """The options of distillation. Each refused field becomes a problem and takes a value that passes its check.

    Args:
        given: values of the fields of `KDConfig`.
        findings: collects the problems.

    Returns:
        None if the values that replace refused ones are refused too.
    """
    values = dict(given)
    for check in FIELD_CHECKS:
        passes = False
        with findings.tolerate():
            check.run(KDFields(**values))
            passes = True
        if not passes:
            values |= _replacements(check.fields, values)
    with findings.tolerate():
        return KDConfig(**values)
    return None


def _replacements(refused: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value for refused fields: the default, or a valid value where there is no default."""
    if refused == SOURCES:  # keep the first one that is given
        first = next((name for name in SOURCES if values[name] is not None), None)
        named = {name: values[name] if name == first else None for name in SOURCES}
        return named if first is not None else {**named, "teacher_hf": ["."]}
    changed = {name: DEFAULTS[name] for name in refused}
    if "ratio" in refused:
        changed["ratio"] = 0.5
    return changed
