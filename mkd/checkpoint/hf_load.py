"""From a Hugging Face folder into the parameters of this rank's model chunks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import nn

from mkd.checkpoint.hf_check import check_tensors, read_architecture
from mkd.checkpoint.hf_families import Entry, Family
from mkd.checkpoint.hf_folder import HFFolder
from mkd.checkpoint.hf_layouts import Shard


def load_hf_weights(
    chunks: Sequence[nn.Module],
    folder: HFFolder,
    tp_rank: int,
    tp_size: int,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fill every parameter of this rank's model chunks (`GPTModel`, or wrapped) in place from `folder`.

    Values are cast to the parameter's dtype. Only this rank's slices are read. Rows that pad the vocabulary become
    zero. Call it before an optimizer copies the parameters. `on_bytes` is told each parameter's size once it is filled.

    Raises `MkdCheckpointError`, naming the tensor or parameter, when the folder is not complete (`check_tensors`), or
    when a parameter has no counterpart in it or has another shape.
    """
    family, args = read_architecture(folder)
    check_tensors(folder, family)
    for chunk in chunks:
        model = unwrap_model(chunk)
        _check_model(model, folder, args)
        _load_chunk(model, folder, family, Shard(tp_rank, tp_size), on_bytes)


def _check_model(model: GPTModel, folder: HFFolder, args: Mapping[str, Any]) -> None:
    """Refuse a model that would leave tensors of the folder unused."""
    if not model.post_process:
        return
    if args["untie_embeddings_and_output_weights"] and model.share_embeddings_and_output_weights:
        raise folder.error(
            "the folder has its own lm_head.weight, the model ties it to the embedding; "
            "give --untie-embeddings-and-output-weights"
        )
    if (layers := model.config.num_layers) != args["num_layers"]:
        raise folder.error(f"the folder has {args['num_layers']} layers, the model {layers}; change --num-layers")


@torch.no_grad()
def _load_chunk(
    model: GPTModel, folder: HFFolder, family: Family, shard: Shard, on_bytes: Callable[[int], None]
) -> None:
    args = family.megatron_args(folder.config)
    dims = family.dims(args)
    by_name = _entries_by_parameter(family, args)
    for name, param in model.named_parameters():
        global_name = _global_name(model, name)
        if global_name not in by_name:
            raise folder.error(f"the model's parameter {global_name} has no counterpart in {family.architectures[0]}")
        entry, sources = by_name[global_name]
        if not args["untie_embeddings_and_output_weights"]:
            # The last pipeline stage has a copy of the embedding as its output layer.
            sources = [family.tied.get(source, source) for source in sources]
        reads = [partial(folder.read, source) for source in sources]
        value = entry.layout.shard(reads, dims, shard, tuple(param.shape))
        if value.shape != param.shape:
            raise folder.error(
                f"{' + '.join(sources)} gives shape {list(value.shape)} on tensor-parallel rank {shard.rank} of "
                f"{shard.size}, the model's parameter {global_name} has {list(param.shape)}"
            )
        param.copy_(value)
        on_bytes(param.nbytes)


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
