"""Hash of the tokenizer in a model folder, for Hugging Face folders and Megatron checkpoints alike."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkd.errors import MkdCheckpointError
from mkd.utils.hub_folder import model_folder
from mkd.utils.json_files import MOST_BYTES, read_json, read_regular

ASSETS = "hf_assets"
"""Subfolder of a Megatron checkpoint with config.json and tokenizer of the Hugging Face model that it comes from."""


def read_json_object(path: Path, flag: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        MkdCheckpointError: naming the file, when it is not readable or not a JSON object.
    """
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise MkdCheckpointError(f"{flag}: {path} is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise MkdCheckpointError(f"{flag}: {path} holds a JSON {type(value).__name__}, an object is needed")
    return value


def tokenizer_hash(path: Path, flag: str) -> str | None:
    """See `HFFolder.tokenizer_hash`; `path` is any folder with tokenizer files."""
    path = model_folder(path, flag)
    if (path / "tokenizer.json").is_file():
        content = read_json_object(path / "tokenizer.json", flag)
        try:
            model = content.get("model") or {}
            merges = merges_of(model)
            added = [[token.get("id"), token.get("content")] for token in content.get("added_tokens") or []]
            parts = {"type": model.get("type"), "vocab": model.get("vocab"), "merges": merges, "added": added}
        except (AttributeError, TypeError) as error:
            raise MkdCheckpointError(f"{flag}: {path}/tokenizer.json describes no tokenizer ({error})") from error
        return hash_hex(json.dumps(parts, sort_keys=True).encode())
    files = [path / name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (path / name).is_file()]
    try:
        return hash_hex(*(read_regular(file, MOST_BYTES) for file in files)) if files else None
    except ValueError as error:
        raise MkdCheckpointError(f"{flag}: a file of the tokenizer in {path} is too large: {error}") from error


def merges_of(model: Mapping[str, Any]) -> list[str]:
    """The merges of a BPE model, whose pairs are strings or lists."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]


def hash_hex(*parts: bytes) -> str:
    """128-bit BLAKE2b hash of the concatenated parts, as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
