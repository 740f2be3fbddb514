"""Hugging Face folders of any size that take no room: what is in them is of no interest, only how much it is."""

import json
from pathlib import Path
from typing import Any

import torch

from mkd.checkpoint.hf.families import family_of
from mkd.checkpoint.hf.folder import INDEX


def make_sparse(folder: Path, config: dict[str, Any], layers_in_a_file: int = 10) -> Path:
    """A bf16 folder of zeros as large as `config` asks for, which takes no room where files may have holes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    files: dict[int, dict[str, Any]] = {}
    for item in family.tensors(family.megatron_args(config)):
        number = 0 if item.layer is None else 1 + item.layer // layers_in_a_file
        files.setdefault(number, {}).update(item.shapes)
    weight_map = {}
    for number, shapes in files.items():
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[name] = f"part-{number}.safetensors"
        raw = json.dumps(header).encode()
        with (folder / f"part-{number}.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder
