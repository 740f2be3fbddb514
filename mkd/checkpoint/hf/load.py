"""Loads a Hugging Face folder into the parameters of this rank's model chunks (pipeline and virtual stages)."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.checkpoint.casts import CastCheck
from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.layouts import Dims, TensorShard
from mkd.checkpoint.hf.tables import Item
from mkd.checkpoint.staged_reads import Staging

# megatron's SequentialMLP has one module per expert, its TEGroupedMLP one parameter per expert.
_EXPERT_NUMBER = re.compile(r"(local_experts\.|\.(?:weight|bias))(\d+)")


def load_hf_weights(
    chunks: Sequence[nn.Module],
    folder: HFFolder,
    vocab: int | None = None,
) -> None:
    """Fill every parameter of this rank's model chunks (`GPTModel`, or wrapped) in place from `folder`.

    Values are cast to the parameter's dtype. Only this rank's slices are read, according to the chunks' own process
    groups. Padding rows of the vocabulary become zero, and so do unused tokens from `vocab` up, if it is given. Call it
    before an optimizer copies the parameters.

    Raises:
        MkdCheckpointError: naming the tensor or parameter, when the folder is not complete (`check_tensors`), or when a
            parameter has no counterpart in the folder or has another shape, or values beyond the range of its dtype.
    """
    family, args = read_architecture(folder)
    check_tensors(folder, family)
    casts = CastCheck(folder.error)
    for chunk in chunks:
        model = unwrap_model(chunk)
        _check_model(model, folder, args)
        staging = Staging.to(next(model.parameters()).device)
        _load_chunk(model, HFParameters(folder, family, args, vocab, staging), casts)
    casts.warn()


class HFParameters:
    """Reads a folder's weights by the names of Megatron's parameters."""

    def __init__(
        self,
        folder: HFFolder,
        family: Family,
        args: Mapping[str, Any],
        vocab: int | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._folder, self._dims, self.staging = folder, family.dims(args), staging
        if vocab is not None:
            self._dims = replace(self._dims, vocab=min(vocab, self._dims.vocab))
        # The last pipeline stage has a copy of the embedding as its output layer.
        self._tied = {} if args["untie_embeddings_and_output_weights"] else family.tied
        self._architecture = family.architectures[0]
        self._by_name = {name: item for item in family.tensors(args) for name in item.parameters}

    def read(self, name: str, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
        """This rank's shard of a parameter, in the folder's dtype, on the CPU or the device of `staging`. Threads may
        call it at one time.

        Args:
            name: name of the parameter under any layer spec, with indices in the whole model.
            shard: this rank among the ranks that share the parameter.
            shape: shape of the parameter on this rank.

        Raises:
            MkdCheckpointError: the folder has no such parameter, or gives another shape.
        """
        if name not in self._by_name:
            raise self._folder.error(f"the model's parameter {name} has no counterpart in {self._architecture}")
        return read_item(self._folder, self._by_name[name], self._dims, shard, shape, self._tied, self.staging)


def read_item(
    folder: HFFolder,
    item: Item,
    dims: Dims,
    shard: TensorShard,
    shape: tuple[int, ...],
    tied: Mapping[str, str],
    staging: Staging | None = None,
) -> Tensor:
    """The shard of one parameter on one rank; see `HFParameters.read`."""
    sources = [tied.get(source, source) for source in item.shapes]
    reads = [partial(folder.read, source, staging=staging) for source in sources]
    if item.entry.has_all_experts:
        reads = [partial(_read_expert, read, item.expert) for read in reads]
    value = item.entry.layout.shard(reads, dims, shard, shape)
    if value.shape != shape:
        raise folder.error(
            f"{' + '.join(sources)} gives shape {list(value.shape)} on tensor-parallel rank {shard.rank} of "
            f"{shard.size}, the model's parameter {item.name} has {list(shape)}"
        )
    return value


def _read_expert(read: Callable[..., Tensor], expert: int, rows: slice | None, cols: slice | None) -> Tensor:
    """A block of one expert's tensor."""
    block = read(slice(expert, expert + 1))[0]
    return block[tuple(part or slice(None) for part in (rows, cols)[: block.dim()])]


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
    if (experts := model.config.num_moe_experts) != args["num_experts"]:
        raise folder.error(f"the folder has {args['num_experts']} experts, the model {experts}; change --num-experts")


@torch.no_grad()
def _load_chunk(model: GPTModel, weights: HFParameters, casts: CastCheck) -> None:
    groups = model.pg_collection
    # The router's expert bias is a buffer, but it is a part of the model like a weight.
    buffers = ((name, value) for name, value in model.named_buffers() if name.endswith(".expert_bias"))
    values = dict((*model.named_parameters(), *buffers))

    def reads() -> Iterator[tuple[int, Callable[[], Tensor]]]:
        for name, param in values.items():
            group = groups.expt_tp if ".experts." in name else groups.tp
            shard = TensorShard(group.rank(), group.size())
            yield param.nbytes, partial(weights.read, global_name(model, name), shard, tuple(param.shape))

    # On the CPU, one after the other: only one parameter is in memory twice.
    staging = weights.staging
    found = (read() for _, read in reads()) if staging is None else staging.in_order(reads())
    for (name, param), value in zip(values.items(), found, strict=True):
        casts.check(name, value, param.dtype)
        param.copy_(value)


def global_name(model: GPTModel, name: str) -> str:
    """Parameter name with layer and expert indices of the whole model instead of those of this chunk."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, rest = name.removeprefix(prefix).split(".", 1)
    if ".experts." in name:
        ep = model.pg_collection.ep
        first = ep.rank() * (model.config.num_moe_experts // ep.size())
        rest = _EXPERT_NUMBER.sub(lambda match: f"{match[1]}{first + int(match[2])}", rest, count=1)
    return f"{prefix}{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
