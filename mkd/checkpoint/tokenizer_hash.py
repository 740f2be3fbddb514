"""Hash of the tokenizer in a model folder, for Hugging Face folders and Megatron checkpoints alike."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mkd.errors import MkdCheckpointError
from mkd.utils.json_files import MOST_BYTES, parse_json, read_regular
from mkd.utils.model_folders.hub_folder import model_folder

ASSETS = "hf_assets"
"""Subfolder of a Megatron checkpoint with config.json and tokenizer of the Hugging Face model that it comes from."""


_known: dict[str, str] = {}
"""Hash of the bytes of a tokenizer.json -> that of its tokenizer. Teacher and student usually have equal files, and a
large vocabulary takes a third of a second."""


def read_json_object(path: Path, flag: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        MkdCheckpointError: naming the file, when it is not readable or not a JSON object.
    """
    with _naming(path, flag):
        return _object_of(read_regular(path, MOST_BYTES), path, flag)


def tokenizer_hash(path: Path, flag: str) -> str | None:
    """See `HFFolder.tokenizer_hash`; `path` is any folder with tokenizer files."""
    path = model_folder(path, flag)
    if (path / "tokenizer.json").is_file():
        return _hash_of_json(path / "tokenizer.json", flag)
    files = [path / name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (path / name).is_file()]
    try:
        return hash_hex(*(read_regular(file, MOST_BYTES) for file in files)) if files else None
    except ValueError as error:
        raise MkdCheckpointError(f"{flag}: a file of the tokenizer in {path} is too large: {error}") from error


def _hash_of_json(file: Path, flag: str) -> str:
    with _naming(file, flag):
        text = read_regular(file, MOST_BYTES)
        if (same := hash_hex(text)) in _known:
            return _known[same]
        content = _object_of(text, file, flag)
    try:
        model = content.get("model") or {}
        merges = merges_of(model)
        added = [[token.get("id"), token.get("content")] for token in content.get("added_tokens") or []]
        parts = {"type": model.get("type"), "vocab": model.get("vocab"), "merges": merges, "added": added}
    except (AttributeError, TypeError) as error:
        raise MkdCheckpointError(f"{flag}: {file} describes no tokenizer ({error})") from error
    _known[same] = hash_hex(json.dumps(parts, sort_keys=True).encode())
    return _known[same]


def _object_of(text: bytes, path: Path, flag: str) -> dict[str, Any]:
    value = parse_json(text.decode())
    if not isinstance(value, dict):
        raise MkdCheckpointError(f"{flag}: {path} holds a JSON {type(value).__name__}, an object is needed")
    return value


@contextmanager
def _naming(path: Path, flag: str) -> Iterator[None]:
    """Name the file in errors of its reading."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise MkdCheckpointError(f"{flag}: {path} is not readable JSON ({error})") from error


def merges_of(model: Mapping[str, Any]) -> list[str]:
    """The merges of a BPE model, whose pairs are strings or lists."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]


def hash_hex(*parts: bytes) -> str:
    """128-bit BLAKE2b hash of the concatenated parts, as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
