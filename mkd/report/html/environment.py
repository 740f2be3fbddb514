"""The environment of a run, from its run.yaml."""

from typing import Any

import yaml

RECORD = "about"
"""Key of run.yaml whose entries are not flags."""
ENTRIES = 80
"""Most facts that are shown."""
CHARACTERS = 400
"""Most characters of a fact."""


def environment_of(run_yaml: str | None) -> list[tuple[str, str]]:
    """Facts about where a run was made: entries of run.yaml that are not flags.

    Args:
        run_yaml: the content of the file; None if there is none.

    Returns:
        Name -> text, for the entries that are plain values, or objects of plain values.
    """
    try:
        content = yaml.safe_load(run_yaml or "")
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    facts = content.get(RECORD) if isinstance(content, dict) else None
    return _facts(facts, "")[:ENTRIES] if isinstance(facts, dict) else []


def _facts(entries: dict[Any, Any], prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in entries.items():
        if isinstance(value, dict):
            found += _facts(value, f"{prefix}{name} ") if not prefix else []
        elif not isinstance(value, list | tuple | set):
            found.append((f"{prefix}{name}", str(value)[:CHARACTERS]))
    return found
