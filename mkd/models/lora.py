"""Low-rank adapters (LoRA) on the linear layers of a frozen GPT model, one per Hugging Face linear layer as in PEFT.

A linear layer W becomes W x + scale B A x. Megatron computes several Hugging Face layers with one matrix: `linear_qkv`
holds the queries, keys and values of each query group, `linear_fc1` gate and up. Their adapters have an A and a B of
their own, and the B's are placed in the rows of the whole matrix. Routed experts: `expert_lora.py`.

Adapters are modules of the model chunk (`kd_lora`), outside of the layers: names and checkpoints of the frozen weights
stay as they are. Forward hooks on the linear layers add the adapters' outputs.

Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mkd.config.lora import LoraOptions
from mkd.models.adapted_layers import AdaptedLinear, Factor, initial_a, short_name
from mkd.models.expert_lora import ExpertAdapters
from mkd.models.layer_maps import KEY_PREFIX as MAPS_PREFIX

_MODULE = "kd_lora"
KEY_PREFIX = f"{_MODULE}."
"""Prefix of the adapters' keys in a checkpoint; the rest is the name of a Hugging Face layer and of the factor."""
_NOTHING = f"{KEY_PREFIX}nothing"
"""Key of an entry that is stored nowhere, in the state of a model chunk without adapters."""


class LinearAdapters(nn.Module):
    """The adapters of one linear layer on this tensor-parallel rank.

    In a column-parallel layer A is replicated and B sharded; in a row-parallel one A is sharded and B replicated. The
    tensor-parallel ranks exchange A x, which has `rank` channels. In a layer that every rank holds whole, both factors
    are replicated.
    """

    def __init__(
        self,
        linear: AdaptedLinear,
        options: LoraOptions,
        config: TransformerConfig,
        tp: ProcessGroup,
        seed: int,
        is_replicated: bool = False,
    ) -> None:
        """Create the factors: A uniform in +-1 / sqrt(inputs) as in PEFT, B zero.

        Args:
            linear: the layer.
            options: rank and scale.
            config: configuration of the model.
            tp: tensor-parallel ranks.
            seed: the values of A depend on it and on the layer's name only.
            is_replicated: every rank holds the whole layer.
        """
        super().__init__()
        self._linear, self._options, self._tp, self._is_replicated = linear, options, tp, is_replicated
        self._sequence_parallel = config.sequence_parallel
        for factor in linear.factors:
            axis = self.sharded_axis(factor)
            if factor.part is None:
                values = self.shard(factor, initial_a(factor.layer, options.rank, linear.inputs, seed))
            else:
                channels = factor.channels // (1 if axis is None else tp.size())
                values = torch.zeros(channels, options.rank, device="cpu")
            parameter = nn.Parameter(values.to(config.params_dtype, copy=True))
            if axis is None:
                # Its gradient comes from this rank's slice of the tokens: under sequence parallelism megatron sums it.
                parameter.sequence_parallel = config.sequence_parallel
            else:
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            self.register_parameter(factor.name, parameter)

    def shard(self, factor: Factor, whole: Tensor) -> Tensor:
        """This rank's part of the factor in the whole A or B of a Hugging Face layer; see `Factor.of`."""
        axis, own = self.sharded_axis(factor), factor.of(whole)
        return own if axis is None else own.chunk(self._tp.size(), axis)[self._tp.rank()]

    @property
    def factors(self) -> tuple[Factor, ...]:
        """See `AdaptedLinear.factors`."""
        return self._linear.factors

    def sharded_axis(self, factor: Factor) -> int | None:
        """The axis along which a factor is sharded over tensor-parallel ranks; None if it is replicated."""
        if self._is_replicated:
            return None
        if self._linear.is_row_parallel:
            return 1 if factor.part is None else None
        return None if factor.part is None else 0

    def sharded_tensors(self, prefix: str, sharded_offsets: tuple, dp_cp: ProcessGroup) -> ShardedStateDict:
        """The parameters as parts of a checkpoint, by `prefix` and name."""
        factors = self._linear.factors
        axes = {factor.name: axis for factor in factors if (axis := self.sharded_axis(factor)) is not None}
        parameters = dict(self.named_parameters())
        return make_sharded_tensors_for_checkpoint(
            parameters, prefix, axes, sharded_offsets, tp_group=self._tp, dp_cp_group=dp_cp
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """scale B A x: the linear layer's inputs [s, b, in] -> [s, b, out], both as the layer has them on this rank."""
        factors = [getattr(self, f"A{index}") for index in range(len(self._linear.layers))]
        latent = nn.functional.linear(inputs, factors[0] if len(factors) == 1 else torch.cat(factors))
        latent = self._exchange(latent) * self._options.scale
        return nn.functional.linear(latent, self._whole_b())

    def _exchange(self, latent: Tensor) -> Tensor:
        """A x of all tokens that the outputs on this rank belong to, complete."""
        if self._tp.size() == 1 or self._is_replicated:
            return latent
        if self._linear.is_row_parallel:
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(latent, group=self._tp)
            return reduce_from_tensor_model_parallel_region(latent, group=self._tp)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(latent, group=self._tp)
        return copy_to_tensor_model_parallel_region(latent, group=self._tp)

    def _whole_b(self) -> Tensor:
        """[out, layers * rank] in the order of Megatron's rows: each part's B in the columns of its A, zeros beside."""
        linear, rank, size = self._linear, self._options.rank, self._tp.size()
        if len(linear.parts) == 1:
            return self.B0
        size = 1 if self._is_replicated else size
        factors = {factor.part: factor for factor in linear.factors if factor.part is not None}
        count, groups = len(linear.layers), 1 if linear.groups is None else linear.groups // size
        blocks = []
        for number, part in enumerate(linear.parts):
            if number in factors:
                factor, index = getattr(self, f"B{number}"), factors[number].index
                block = nn.functional.pad(factor, (index * rank, (count - 1 - index) * rank))
            else:
                block = self.A0.new_zeros(part.channels // size, count * rank)
            blocks.append(block.unflatten(0, (groups, -1)))
        return torch.cat(blocks, dim=1).flatten(0, 1)


class ChunkAdapters(nn.ModuleDict):
    """The adapters of a model chunk, by transformer layer and linear layer."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """See `MegatronModule`. The keys in a checkpoint are names of Hugging Face layers, the same in every layout."""
        state: ShardedStateDict = {}
        for name, adapters in self.items():
            tensors = adapters.sharded_tensors(f"{prefix}{name}.", sharded_offsets, metadata["dp_cp_group"])
            for factor in adapters.factors:
                tensors[f"{prefix}{name}.{factor.name}"].key = f"{KEY_PREFIX}{factor.key}"
            state |= tensors
        return state


@dataclass(frozen=True)
class Lora:
    """Adapters of a model, to be attached to its chunks before they are wrapped."""

    options: LoraOptions
    linears: Sequence[AdaptedLinear]
    seed: int
    first: Callable[[str], tuple[Tensor, Tensor]] | None = None
    """Name of a Hugging Face layer -> its A [rank, in] and B [out, rank], with which training begins; None for new
    ones."""

    @property
    def modules(self) -> list[str]:
        """Names of the Hugging Face layers without the path to them, sorted."""
        return sorted({short_name(layer) for linear in self.linears for layer in linear.layers})

    @property
    def parameters(self) -> int:
        """Number of parameters of all adapters."""
        return sum(linear.parameters(self.options.rank) for linear in self.linears)

    def attach(self, chunks: list[GPTModel]) -> list[GPTModel]:
        """Freeze the weights of a model, and add adapters to its chunks on this rank. The weights are loaded already.

        A hook for `GPTModelConfig.pre_wrap_hooks`.
        """
        for chunk in chunks:
            chunk.requires_grad_(False)
            adapters = ChunkAdapters()
            for layer in chunk.decoder.layers:
                own = [linear for linear in self.linears if linear.decoder_layer == layer.layer_number - 1]
                for linear in own:
                    name = f"{linear.decoder_layer}-{linear.path.replace('.', '-')}"
                    adapters[name] = self._add(chunk, layer, linear)
                    if self.first is not None:
                        self._fill(adapters[name], linear)
            chunk.add_module(_MODULE, adapters)
            if chunk.pre_process and chunk.config.recompute_granularity is not None:
                # Recomputed layers have gradients only if their input has one, which a frozen embedding does not give.
                chunk.embedding.register_forward_hook(_with_gradient)
            store_trained_only(chunk)
        return chunks

    def _add(self, chunk: GPTModel, layer: nn.Module, linear: AdaptedLinear) -> "LinearAdapters | ExpertAdapters":
        """New adapters of a linear layer, which adds their output to its own from now on."""
        if linear.experts is not None:
            adapters = ExpertAdapters(linear, self.options, chunk.config, chunk.pg_collection, self.seed)
            adapters.hook(layer.mlp.experts)
            return adapters
        module = layer.get_submodule(linear.path)
        # Transformer Engine's projections to a latent are whole on every rank, megatron's local ones are sharded.
        whole = sum(part.channels for part in linear.parts)
        is_replicated = not linear.is_row_parallel and module.weight.shape[0] == whole
        adapters = LinearAdapters(
            linear, self.options, chunk.config, chunk.pg_collection.tp, self.seed, is_replicated=is_replicated
        )
        _hook(module, adapters)
        return adapters

    @torch.no_grad()
    def _fill(self, adapters: "LinearAdapters | ExpertAdapters", linear: AdaptedLinear) -> None:
        """Give the factors of a linear layer the values of `first`."""
        for layer in linear.layers:
            a, b = self.first(layer)
            for factor in linear.factors:
                if factor.layer == layer:
                    getattr(adapters, factor.name).copy_(adapters.shard(factor, a if factor.part is None else b))


def _hook(linear: nn.Module, adapters: LinearAdapters) -> None:
    if hasattr(linear, "return_layernorm_output"):
        # Transformer Engine's norm and projection in one module: adapters read the normalized input.
        linear.return_layernorm_output = True
    # First, because other hooks multiply the output (Granite).
    linear.register_forward_hook(partial(_add_output, adapters), prepend=True)


def _add_output(adapters: LinearAdapters, linear: nn.Module, inputs: tuple, output: tuple) -> tuple:
    """Forward hook on a linear layer that returns (output, bias).

    Transformer Engine's with a norm returns ((output, normalized input), None) or (output, bias, normalized input).
    """
    value, bias, *normalized = output
    if isinstance(value, tuple):
        value, *normalized = value
    return value + adapters(*normalized or inputs[:1]), bias


def _with_gradient(embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def store_trained_only(chunk: GPTModel) -> None:
    """Make checkpoints of a model chunk hold its trained modules without the frozen weights."""
    kept = (KEY_PREFIX, MAPS_PREFIX)

    def trained_state(*args: Any, **options: Any) -> ShardedStateDict:
        whole = type(chunk).sharded_state_dict(chunk, *args, **options)
        trained = {name: value for name, value in whole.items() if name.startswith(kept)}
        # Megatron's reader returns no state at all for a chunk whose state is empty, and then misses it.
        return trained or {_NOTHING: LocalNonpersistentObject(None)}

    def without_frozen(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name.startswith(kept)]
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if name != _NOTHING]

    chunk.sharded_state_dict = trained_state
    chunk.register_load_state_dict_post_hook(without_frozen)
