"""The readable part of a command line, and settings without those that are refused: what is examined beside them."""

import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from mkd.config import flags
from mkd.config.kd_config import KDConfig
from mkd.doctor.findings import Findings
from mkd.errors import MkdConfigError


def readable(words: Sequence[str], findings: Findings) -> list[str]:
    """The words without flags that do not exist, contradict distillation or have a value that cannot be read.

    Each of them becomes a problem, and is set aside with its values.
    """
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    parser = flags.add_kd_flags(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
    kept = []
    for group in groups:
        with findings.tolerate():
            flags.refuse_contradictions(group)
            _, unknown = parser.parse_known_args(group)
            kept += [word for word in group if word not in unknown]
            if unknown:
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return kept


def settled(given: Mapping[str, Any], findings: Findings) -> KDConfig | None:
    """The settings, with something else in place of each that is refused; every refusal becomes a problem.

    Args:
        given: values of the fields of `KDConfig`.
        findings: gets the problems.

    Returns:
        None when a refusal names no field.
    """
    values = dict(given)
    for _ in range(2 * len(values)):
        try:
            return KDConfig(**values)
        except MkdConfigError as error:
            findings.problem(str(error))
            if not _replace_first_named(values, str(error)):
                break
    return None


def _replace_first_named(values: dict[str, Any], message: str) -> bool:
    """Put something harmless in place of the first flag in a message that is not harmless yet; False without one."""
    has_schedule = values["ratio_schedule"] != "constant"
    has_teacher = values["teacher_load"] is not None or values["teacher_cache"] is not None
    harmless = {
        **{field.name: field.default for field in fields(KDConfig)},
        "ratio": None if has_schedule else 0.5,
        "teacher_hf": None if has_teacher else ["."],
    }
    named = [name.replace("-", "_") for name in re.findall(r"--kd-([a-z][a-z-]*[a-z])", message)]
    name = next((name for name in named if name in values and values[name] != harmless[name]), None)
    if name is None:
        return False
    values[name] = harmless[name]
    if name == "ratio_schedule":
        values["ratio"] = 0.5
    return True
