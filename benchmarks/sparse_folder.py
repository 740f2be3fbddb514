"""Hugging Face folders of any size in sparse files, for tests and benchmarks in which the weights do not matter."""

import json
from pathlib import Path
from typing import Any

import torch

from mkd.checkpoint.hf.families import family_of
from mkd.checkpoint.hf.folder import INDEX
from mkd.checkpoint.safetensors_files import tensor_bytes, write_header


def make_sparse(folder: Path, config: dict[str, Any], layers_per_file: int = 10) -> Path:
    """A bf16 folder of zeros with the tensors that `config` implies. Sparse files need almost no disk space."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    files: dict[int, dict[str, Any]] = {}
    for item in family.tensors(family.megatron_args(config)):
        number = 0 if item.layer is None else 1 + item.layer // layers_per_file
        files.setdefault(number, {}).update(item.shapes)
    weight_map = {}
    for number, shapes in files.items():
        tensors = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
        header = write_header(tensors)
        with (folder / f"part-{number}.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor_bytes(*tensor) for tensor in tensors.values()))
        weight_map |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder
