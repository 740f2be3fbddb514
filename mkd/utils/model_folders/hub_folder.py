"""Folders of the Hugging Face hub: snapshots in its cache, and names of repositories where a folder is needed.

mkd downloads nothing; it finds what `hf download` left, and names the command.
"""

import os
import re
from pathlib import Path

from mkd.errors import MkdConfigError
from mkd.utils.json_files import read_regular
from mkd.utils.near_paths import near_path_hint

_REPOSITORY = re.compile(r"(?:https?:/{1,2}(?:www\.)?huggingface\.co/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")

_REF_BYTES = 200
"""Largest refs/main, which holds a commit."""


def model_folder(folder: str | os.PathLike, flag: str) -> Path:
    """The folder of a model: the given one, or the snapshot in a folder models--ORG--NAME of the hub's cache.

    The snapshot is the one that refs/main names, which is the newest that was downloaded, or the only one.

    Args:
        folder: as given, also absent.
        flag: the flag that named it, for messages.

    Raises:
        MkdConfigError: the cache folder has no snapshot, or several and refs/main names none of them.
    """
    path = Path(folder)
    if not (path / "snapshots").is_dir() or not (path.name.startswith("models--") or (path / "refs").is_dir()):
        return path
    snapshots = sorted(one for one in (path / "snapshots").iterdir() if one.is_dir())
    main = path / "refs" / "main"
    if main.is_file():
        try:
            commit = read_regular(main, _REF_BYTES).decode(errors="replace").strip()
        except ValueError as error:
            raise MkdConfigError(f"{flag} {folder}: refs/main of this folder of the hub's cache: {error}") from None
        named = [one for one in snapshots if one.name == commit]
        if named:
            return named[0]
    if len(snapshots) == 1:
        return snapshots[0]
    if not snapshots:
        raise MkdConfigError(
            f"{flag} {folder}: this folder of the hub's cache has no snapshot; download it again (hf download "
            f"{repository_of_cache(path.name)})"
        )
    names = ", ".join(one.name for one in snapshots[:4]) + (", ..." if len(snapshots) > 4 else "")
    raise MkdConfigError(
        f"{flag} {folder}: this folder of the hub's cache has {len(snapshots)} snapshots ({names}) and refs/main names "
        f"none of them; give one: {path / 'snapshots'}/COMMIT"
    )


def download_hint(folder: str | os.PathLike) -> str:
    """The rest of a message about an absent folder; empty if it is neither like an existing folder nor the name of a
    repository.

    An existing folder of a similar name comes first: ORG/NAME is also a relative path.
    """
    if near := near_path_hint(folder, Path.is_dir):
        return near
    found = _REPOSITORY.fullmatch(str(folder))
    if found is None:
        return ""
    name = found[1]
    cached = _cache_root() / f"models--{name.replace('/', '--')}"
    if (cached / "snapshots").is_dir():
        return f"; the hub's cache has a repository of this name: give {cached}"
    short = name.partition("/")[2]
    return (
        f"; mkd downloads nothing: if this is a repository of the Hugging Face hub, run hf download {name} --local-dir "
        f"{short}, and give {short}"
    )


def repository_of_cache(name: str) -> str:
    """ORG/NAME from the name of a cache folder."""
    return name.removeprefix("models--").replace("--", "/", 1)


def _cache_root() -> Path:
    """The hub's cache, as huggingface_hub finds it."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path("~/.cache/huggingface").expanduser()) / "hub"
