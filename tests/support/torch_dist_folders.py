"""Small torch_dist folders, and functions that damage a file."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from mkd.checkpoint.megatron.integrity import file_hash, write_manifest

SHARD = "__0_0.distcp"


def name_of(step: int) -> str:
    return f"iter_{step:07d}"


def write_checkpoint(folder: Path, value: float) -> None:
    """Write two tensors with hashes, in the order of a save, in one process."""
    state = {"decoder.weight": torch.full((64, 32), value), "decoder.bias": torch.full((64,), value)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    write_manifest(folder, {path.name: file_hash(path) for path in folder.glob("*.distcp")})


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
