"""Free memory of the machine."""

from pathlib import Path

_SYSTEM = Path("/proc/meminfo")
_GROUPS = (("memory.max", "memory.stat", "anon"), ("memory/memory.limit_in_bytes", "memory/memory.stat", "rss"))
"""Limit, statistics, and the name of used memory in them, of a container: version 2 and 1 of Linux' control groups."""


def free_host_bytes(system: Path = _SYSTEM, groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that processes can still take, of the machine or of the container; None if that is unknown.

    Pages of files count as free.
    """
    found = []
    if (kib := _number(system, "MemAvailable:")) is not None:
        found.append(1024 * kib)
    for limit, statistics, used in _GROUPS:
        most, taken = _number(groups / limit), _number(groups / statistics, used)
        if most is not None and taken is not None:
            found.append(max(most - taken, 0))
    return min(found, default=None)


def _number(file: Path, name: str = "") -> int | None:
    """The number after a name at the beginning of a line; None if there is none."""
    try:
        lines = [line.split() for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    values = [line[1:] for line in lines if line[:1] == [name]] if name else lines
    words = values[0] if values else []
    return int(words[0]) if words and words[0].isdecimal() else None
