"""Checks that the folder of one iteration (torch_dist) is complete and that its content has not changed.

A save writes the shards, then `.metadata` (the index: tensor -> file, offset, length), then `metadata.json`. Beside
them is `integrity.json`, the SHA-256 of every file in the format of Megatron's own `--verify-integrity`.

Two checks, of different cost:

- `find_damage`: `metadata.json` and the index are readable, the index has its recorded hash, and every shard that it
  names exists with its length. Quick; it runs on every checkpoint that is considered, on each rank.
- `changed_files`: the SHA-256 of every file is the recorded one. Reads everything; it runs once per start, on the
  selected checkpoint, and the ranks share the files. `--kd-skip-checkpoint-hashes` disables it.

The hashes are computed during the save: each rank hashes its own shards while they are still in the page cache.
"""

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mkd.compat.unpickling import allowed_classes_only
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import replacing
from mkd.utils.json_files import read_json

INTEGRITY = "integrity.json"
_ALGORITHM = "sha256"
DAMAGE = (
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    AttributeError,
    TypeError,
    pickle.UnpicklingError,
    CheckpointException,  # not an Exception
)
"""Errors of torch on damaged metadata."""


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into `MkdCheckpointError`: a temporary failure is not a damaged checkpoint."""
    try:
        yield
    except OSError as error:
        raise MkdCheckpointError(
            f"{folder} cannot be read ({error}): nothing was changed there; restart the job when the file system works"
        ) from error


def find_damage(folder: Path) -> str | None:
    """The reason why a folder is not a complete torch_dist checkpoint; None if every file exists with its length.

    Reads the index, not the shards; `changed_files` finds changed bytes.

    Raises:
        MkdCheckpointError: the folder cannot be read at the moment, and may be complete; or its index would run code.
    """
    with _reading(folder):
        return _find_damage(folder)


def _find_damage(folder: Path) -> str | None:
    try:
        if not isinstance(read_json(folder / "metadata.json"), dict):
            return "metadata.json is damaged"
    except FileNotFoundError:
        return "metadata.json is missing"
    except ValueError as error:
        return f"metadata.json is damaged ({error})"
    if not (folder / ".metadata").is_file():
        return ".metadata is missing"
    try:
        with allowed_classes_only():
            sizes = shard_sizes(dcp.FileSystemReader(folder).read_metadata())
    except MkdCheckpointError as error:  # not damaged: nothing is set aside for it
        raise MkdCheckpointError(f"{folder}: {error}") from error
    except DAMAGE as error:
        return f".metadata is damaged ({type(error).__name__})"
    for name, size in sizes.items():
        if Path(name).name != name:
            return f".metadata names the file {name}, which is not in the folder"
        if not (folder / name).is_file():
            return f"shard {name} is missing"
        if (found_size := (folder / name).stat().st_size) != size:
            return f"shard {name} has {found_size} bytes instead of {size}"
    if changed_index(folder):
        return ".metadata is not what was written (its SHA-256 differs)"
    return None


def changed_index(folder: Path) -> bool:
    """True if the index is not the one that was saved; False also without a readable `integrity.json`.

    Raises:
        OSError: the index cannot be read.
    """
    try:
        expected = read_json(folder / INTEGRITY)["files"][".metadata"]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # `changed_files` reports a damaged integrity.json
    return file_hash(folder / ".metadata") != expected


def shard_sizes(metadata: dcp.Metadata) -> dict[str, int]:
    """File name -> length in bytes of every file that the index names."""
    sizes: dict[str, int] = {}
    for block in metadata.storage_data.values():
        sizes[block.relative_path] = max(sizes.get(block.relative_path, 0), block.offset + block.length)
    return sizes


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def hash_files(folder: Path, names: Sequence[str], into: str) -> None:
    """Write the hashes of the files `names` of `folder` into its file `into`."""
    hashes = {name: file_hash(folder / name) for name in names}
    with replacing(folder / into) as out:
        json.dump(hashes, out)


def take_hashes(folder: Path, file: str) -> dict[str, str]:
    """File name -> hash, as written by `hash_files`; empty without such a file. The file is removed."""
    try:
        hashes = read_json(folder / file)
    except FileNotFoundError:
        return {}
    (folder / file).unlink()
    return hashes


def write_manifest(folder: Path, hashes: Mapping[str, str]) -> None:
    """Write `integrity.json`: the given hashes and those of the two index files."""
    own = {name: file_hash(folder / name) for name in ("metadata.json", ".metadata")}
    with replacing(folder / INTEGRITY) as out:
        json.dump({"algorithm": _ALGORITHM, "files": dict(sorted({**hashes, **own}.items()))}, out, indent=2)


def changed_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Problems with the content of every `parts`-th file from number `part` on, one sentence per file.

    Empty if the files are as they were saved, and if the checkpoint has no `integrity.json`.

    Raises:
        MkdCheckpointError: the folder cannot be read at the moment.
    """
    if not (folder / INTEGRITY).is_file():
        return []
    try:
        manifest: dict[str, Any] = read_json(folder / INTEGRITY)
        algorithm, hashes = manifest["algorithm"], dict(manifest["files"])
    except (ValueError, LookupError, TypeError):
        return [f"{INTEGRITY} is damaged"]
    if algorithm != _ALGORITHM:
        return [f"{INTEGRITY} has hashes of the kind {algorithm!r} instead of {_ALGORITHM!r}"]
    found = []
    with _reading(folder):
        for name in sorted(hashes)[part::parts]:
            if not (folder / name).is_file():
                found.append(f"{name} is missing")
            elif file_hash(folder / name) != hashes[name]:
                found.append(f"{name} is not what was written (its SHA-256 differs)")
    return found
