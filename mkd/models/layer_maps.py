"""Trained linear maps from the student's width to the teacher's, one a pair of layers, as a part of the student.

They are trained, saved and resumed with it, and are no part of the model that is exported.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn

from mkd.config.kd_config import LayerPair

_MODULE = "kd_projections"
KEY_PREFIX = f"{_MODULE}."
"""Beginning of the maps' keys in a checkpoint."""


def name_of_map(pair: LayerPair) -> str:
    """Name of a pair's map among the maps; torch allows no colon."""
    return f"{pair.student}_{pair.teacher}"


def pair_of_key(key: str) -> LayerPair:
    """The pair whose map a checkpoint holds under `key`, which begins with `KEY_PREFIX`, whatever the layout."""
    student, teacher = key.removeprefix(KEY_PREFIX).removesuffix(".weight").split("_")
    return LayerPair(int(student), int(teacher))


def new_map(pair: LayerPair, config: TransformerConfig, width: int, seed: int) -> nn.Linear:
    """A map without bias, weight [width, Hs]; its first values depend on nothing but the seed and the pair.

    Args:
        pair: the layers.
        config: the student's.
        width: of the teacher's hidden states.
        seed: --seed.
    """
    projection = nn.Linear(config.hidden_size, width, bias=False, dtype=config.params_dtype, device="cpu")
    digest = hashlib.sha256(f"{seed} {pair}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    # Keeps the size of the numbers: those of P h are as large as those of h.
    values = torch.randn(width, config.hidden_size, generator=generator, device="cpu") / config.hidden_size**0.5
    projection.weight.data.copy_(values)
    # Every tensor-parallel rank has the whole map; where each has a slice of the sequence, megatron adds the gradients.
    projection.weight.sequence_parallel = config.sequence_parallel
    return projection


def add_maps(chunk: GPTModel, maps: nn.ModuleDict) -> None:
    """Make maps, which may be none, a part of a chunk of the student. Every chunk needs this call."""
    if maps:
        chunk.add_module(_MODULE, maps)
    # Where megatron loads weights that begin a new run, it asks each chunk for this, and does not expect the maps.
    chunk.hide_loss_modules = partial(_hidden, chunk)


@contextlib.contextmanager
def _hidden(chunk: GPTModel) -> Iterator[None]:
    maps = chunk._modules.pop(_MODULE, None)
    try:
        yield
    finally:
        if maps is not None:
            chunk.add_module(_MODULE, maps)
