"""Trained linear maps from the student's hidden width to the teacher's, one per pair of layers.

The maps are submodules of the student: they are trained, saved and resumed with it, but not exported.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn

from mkd.config.values import LayerPair

_MODULE = "kd_projections"
KEY_PREFIX = f"{_MODULE}."
"""Prefix of the maps' keys in a checkpoint."""


def name_of_map(pair: LayerPair) -> str:
    """Module name of a pair's map; torch does not allow colons in names."""
    return f"{pair.student}_{pair.teacher}"


def pair_of_key(key: str) -> LayerPair:
    """The pair of layers of a key that begins with `KEY_PREFIX`; keys are the same in every parallel layout."""
    student, teacher = key.removeprefix(KEY_PREFIX).removesuffix(".weight").split("_")
    return LayerPair(int(student), int(teacher))


def new_map(pair: LayerPair, config: TransformerConfig, width: int, seed: int) -> nn.Linear:
    """A map without bias, weight [width, Hs]; its initial values depend only on the seed and the pair.

    Args:
        pair: the layers.
        config: configuration of the student.
        width: width of the teacher's hidden states.
        seed: --seed.
    """
    projection = nn.Linear(config.hidden_size, width, bias=False, dtype=config.params_dtype, device="cpu")
    digest = hashlib.sha256(f"{seed} {pair}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    # Preserves the variance: the entries of P h have the scale of those of h.
    values = torch.randn(width, config.hidden_size, generator=generator, device="cpu") / config.hidden_size**0.5
    projection.weight.data.copy_(values)
    # Every tensor-parallel rank holds the full map; under sequence parallelism megatron all-reduces its gradients.
    projection.weight.sequence_parallel = config.sequence_parallel
    return projection


def add_maps(chunk: GPTModel, maps: nn.ModuleDict) -> None:
    """Add maps, possibly none, to a model chunk of the student. Every chunk needs this call."""
    if maps:
        chunk.add_module(_MODULE, maps)
    # megatron calls this on each chunk when it loads the initial weights of a run, which do not include the maps.
    chunk.hide_loss_modules = partial(_hide_maps, chunk)


@contextlib.contextmanager
def _hide_maps(chunk: GPTModel) -> Iterator[None]:
    maps = chunk._modules.pop(_MODULE, None)
    try:
        yield
    finally:
        if maps is not None:
            chunk.add_module(_MODULE, maps)
