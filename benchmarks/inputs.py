"""Inputs of benchmarks and tests in which values do not matter: Hugging Face folders of any size, and random tokens."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mkd.checkpoint.hf.families import family_of
from mkd.checkpoint.hf.folder import INDEX
from mkd.checkpoint.safetensors_files import tensor_bytes, write_header

LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
WRITERS = 8
"""Files written at a time."""
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def llama(layers: int, width: int, ffn: int, heads: int, groups: int, vocab: int, tied: bool) -> dict[str, Any]:
    """config.json of a Llama model."""
    return LLAMA | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def make_sparse(folder: Path, config: dict[str, Any], layers_per_file: int = 10) -> Path:
    """A bf16 folder of zeros with the tensors that `config` implies. Sparse files need almost no disk space."""

    def leave_a_hole(file: BinaryIO, tensors: Shapes) -> None:
        file.truncate(file.tell() + sum(tensor_bytes(*tensor) for tensor in tensors.values()))

    return _make_folder(folder, config, layers_per_file, leave_a_hole)


def make_random(folder: Path, config: dict[str, Any], layers_per_file: int = 2) -> Path:
    """A bf16 folder with the tensors that `config` implies: matrices of normal numbers of standard deviation 0.02, in
    which one block of 32 MiB repeats, and vectors of ones. Several files are written at a time."""
    block = torch.empty(16 << 20).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0)).bfloat16()
    noise, ones = (_repeated(block), _repeated(torch.ones(1 << 20, dtype=torch.bfloat16)))

    def fill(file: BinaryIO, tensors: Shapes) -> None:
        for shape, dtype in tensors.values():
            for piece in (noise if len(shape) > 1 else ones)(tensor_bytes(shape, dtype)):
                file.write(piece)

    return _make_folder(folder, config, layers_per_file, fill)


def write_tokens(prefix: Path, documents: int, length: int, vocab: int) -> Path:
    """PREFIX.bin and PREFIX.idx with random ids below `vocab` - 1, one document per `length` tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for seed in range(documents):
        tokens = np.random.default_rng(seed).integers(0, vocab - 1, length)
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def _make_folder(
    folder: Path, config: dict[str, Any], layers_per_file: int, write: Callable[[BinaryIO, Shapes], None]
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    files: dict[int, dict[str, Any]] = {}
    for item in family.tensors(family.megatron_args(config)):
        number = 0 if item.layer is None else 1 + item.layer // layers_per_file
        files.setdefault(number, {}).update(item.shapes)

    def write_file(number: int) -> dict[str, str]:
        name, tensors = (
            f"part-{number}.safetensors",
            {key: (shape, torch.bfloat16) for key, shape in files[number].items()},
        )
        with (folder / name).open("wb") as file:
            file.write(write_header(tensors))
            write(file, tensors)
        return dict.fromkeys(tensors, name)

    with ThreadPoolExecutor(WRITERS) as pool:
        weight_map = {key: name for names in pool.map(write_file, files) for key, name in names.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _repeated(block: torch.Tensor) -> Callable[[int], Iterator[memoryview]]:
    """A function from a number of bytes to that many bytes of the block, repeated."""
    view = memoryview(block.view(torch.uint8).numpy())

    def pieces(nbytes: int) -> Iterator[memoryview]:
        for begin in range(0, nbytes, len(view)):
            yield view[: min(len(view), nbytes - begin)]

    return pieces
