"""From a Hugging Face folder into the parameters of this rank's model chunks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import nn

from mkd.checkpoint.hf_families import Entry, Family, family_of
from mkd.checkpoint.hf_folder import HFFolder
from mkd.checkpoint.hf_layouts import Part

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(folder: HFFolder, family: Family) -> None:
    """Raise `MkdCheckpointError` unless the folder holds exactly the tensors that its config.json asks for.

    Names a tensor that is missing, unknown, of another shape, or not stored in a floating-point type.
    """
    args = family.megatron_args(folder.config)
    expected = {name: shape for _, _, shapes in family.tensors(args) for name, shape in shapes.items()}
    optional = set() if args["untie_embeddings_and_output_weights"] else set(family.tied)
    for name, shape in expected.items():
        if name not in folder.tensors:
            if name in optional:
                continue
            raise folder.error(f"tensor {name} of shape {list(shape)} is missing")
        seen, dtype = folder.tensors[name]
        if seen != shape:
            raise folder.error(f"tensor {name} has shape {list(seen)}, config.json asks for {list(shape)}")
        if dtype not in _WEIGHT_DTYPES:
            raise folder.error(f"tensor {name} is stored as {dtype}; quantized weights are not read")
    for name in folder.tensors:
        if name not in expected and not name.endswith(family.ignored):
            raise folder.error(f"tensor {name} is not part of {family.architectures[0]}")
    for name in optional & folder.tensors.keys():
        if not torch.equal(folder.read(name), folder.read(family.tied[name])):
            raise folder.error(
                f'tensor {name} differs from {family.tied[name]}, but config.json says "tie_word_embeddings": true'
            )


def load_hf_weights(chunks: Sequence[nn.Module], folder: HFFolder, tp_rank: int, tp_size: int) -> None:
    """Fill every parameter of this rank's model chunks (`GPTModel`, or wrapped) in place from `folder`.

    Values are cast to the parameter's dtype. Only this rank's slices are read. Rows that pad the vocabulary become
    zero. Call it before an optimizer copies the parameters.

    Raises `MkdCheckpointError`, naming the tensor or parameter, when the folder is not complete (`check_tensors`), or
    when a parameter has no counterpart in it or has another shape.
    """
    family = family_of(folder.config)
    check_tensors(folder, family)
    for chunk in chunks:
        _load_chunk(unwrap_model(chunk), folder, family, tp_rank, tp_size)


@torch.no_grad()
def _load_chunk(model: GPTModel, folder: HFFolder, family: Family, tp_rank: int, tp_size: int) -> None:
    args = family.megatron_args(folder.config)
    dims = family.dims(args)
    untied = args["untie_embeddings_and_output_weights"]
    if untied and model.post_process and model.share_embeddings_and_output_weights:
        raise folder.error(
            "the folder has its own lm_head.weight, the model ties it to the embedding; "
            "give --untie-embeddings-and-output-weights"
        )
    if model.post_process and len(model.decoder.layers) and model.decoder.layers[-1].layer_number != args["num_layers"]:
        raise folder.error(
            f"the folder has {args['num_layers']} layers, the model {model.decoder.layers[-1].layer_number}; "
            "change --num-layers"
        )
    by_name = _entries_by_parameter(family, args)
    for name, param in model.named_parameters():
        global_name = _global_name(model, name)
        if global_name not in by_name:
            raise folder.error(f"the model's parameter {global_name} has no counterpart in {family.architectures[0]}")
        entry, sources = by_name[global_name]
        if not untied:
            sources = [family.tied.get(source, source) for source in sources]
        part = Part(tp_rank, tp_size, tuple(param.shape))
        value = entry.layout.shard([partial(folder.read, source) for source in sources], dims, part)
        if value.shape != param.shape:
            raise folder.error(
                f"{' + '.join(sources)} gives shape {list(value.shape)} on tensor-parallel rank {tp_rank} of "
                f"{tp_size}, the model's parameter {global_name} has {list(param.shape)}"
            )
        param.copy_(value)


def _entries_by_parameter(family: Family, args: Mapping[str, Any]) -> dict[str, tuple[Entry, list[str]]]:
    """Global parameter name, under every layer spec, -> its table entry and Hugging Face tensors."""
    return {
        name.format(layer=layer): (entry, list(shapes))
        for entry, layer, shapes in family.tensors(args)
        for name in (entry.megatron, *entry.aliases)
    }


def _global_name(model: GPTModel, name: str) -> str:
    """Parameter name with the layer's index in the whole model instead of its index in this chunk."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, rest = name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
