"""The environment of a run, from its run.yaml."""

from typing import Any

from mkd.config.run_file import record_of

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
    return _facts(record_of(run_yaml or ""), "")[:ENTRIES]


def _facts(entries: dict[Any, Any], prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in entries.items():
        if isinstance(value, dict):
            found += _facts(value, f"{prefix}{name} ") if not prefix else []
        elif not isinstance(value, list | tuple | set):
            found.append((f"{prefix}{name}", str(value)[:CHARACTERS]))
    return found
