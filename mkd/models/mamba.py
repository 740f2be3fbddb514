"""Models whose layers each have one mixer: Mamba 2, attention, an MLP or a mixture of experts (Nemotron-H).

Each is a Megatron transformer layer whose other half is the identity, so that the model is a GPTModel with the layer
numbers of the Hugging Face folder. megatron-core 0.19's `MambaMixer` needs the package mamba_ssm, also to be built, and
computes without a lower limit of the time step, which transformers has: the mixer here is mkd's own, computed by
PyTorch's operations on CPU and GPU. Context parallelism is Megatron's of linear attention: between the projections, an
all-to-all gives each rank whole rows of its share of the heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import get_parameter_local_cp, tensor_a2a_cp2hp, tensor_a2a_hp2cp
from megatron.core.ssm.gated_delta_net.common import _build_thd_cp_a2a_perm
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from megatron.training.models import GPTModelConfig
from torch import Tensor, nn
from torch.nn import functional as F

from mkd.models.layer_options import MAMBA, MIXTURE, MLP_ONLY, LayerOptions
from mkd.models.layer_specs import backend_of, numbered_layers
from mkd.models.parameter_sync import finish_parameter_sync
from mkd.models.state_space import (
    CHUNK,
    Segments,
    block_length,
    causal_conv,
    chunked_scan,
    gated_group_norm,
    recomputed,
)

_CONVOLVED = "x B C"
"""Sections of the input projection that the convolution reads."""


@dataclass
class MambaSubmodules:
    """The linear layers of a Mamba 2 mixer."""

    in_proj: type
    out_proj: type


class Mamba2Mixer(MegatronModule):
    """A Mamba 2 mixer in place of self-attention; tensor and context parallelism share heads and groups.

    The backward pass recomputes everything between the two projections, a block of tokens at a time: the products
    between the tokens of a chunk would otherwise be kept for every head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaSubmodules,
        layer_number: int,
        *,
        least_step: float,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        """A mixer with the parameters of transformers' initialization.

        Args:
            config: of the model.
            submodules: the linear layers.
            layer_number: counted from 1.
            least_step: lower limit of the time step dt.
            pg_collection: process groups.
            unused: arguments of attention.
        """
        super().__init__(config)
        self._tp, self._cp, self._least_step = pg_collection.tp, pg_collection.cp, least_step
        self.layer_number = layer_number
        size = self._tp.size()
        heads, groups = config.mamba_num_heads // size, config.mamba_num_groups // size
        inner, states = heads * config.mamba_head_dim, groups * config.mamba_state_dim
        self._sections = {"z": inner, "x": inner, "B": states, "C": states, "dt": heads}
        self._own = {name: width // self._cp.size() for name, width in self._sections.items()}
        """Channels between the projections; less than `_sections` under context parallelism."""
        self._groups, convolved = groups // self._cp.size(), inner + 2 * states
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self._tp}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self._sections.values()) * size,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            inner * size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        kernel = (convolved, 1, config.linear_conv_kernel_dim)
        self.conv1d = _Parameters(config, weight=kernel, bias=(convolved,))
        self.norm = _Parameters(config, weight=(inner,))
        per_head = _Parameters(config, dt_bias=(heads,), A_log=(heads,), D=(heads,))
        for name, parameter in per_head.named_parameters():
            self.register_parameter(name, parameter)
        if config.perform_initialization:
            self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        heads = len(self.A_log)
        first = self._tp.rank() * heads + 1
        self.A_log.copy_(torch.arange(first, first + heads, device=self.A_log.device).log())
        for parameter in (self.D, self.norm.weight):
            parameter.fill_(1.0)
        with get_cuda_rng_tracker().fork():  # each tensor-parallel rank has channels and heads of its own
            bound = self.config.linear_conv_kernel_dim**-0.5
            for parameter in self.conv1d.parameters():
                parameter.uniform_(-bound, bound)
            step = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # softplus of it is the step

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As attention: [s / cp, b, H] -> (output [s / cp, b, H], no bias); s / cp / tp under sequence parallelism."""
        for module in (self.conv1d, self.norm):
            finish_parameter_sync(module)
        projected, _ = self.in_proj(hidden_states)
        bounds = _bounds(packed_seq_params)
        projected, back_to_ranks = self._whole_rows(projected, bounds)
        segments = None if bounds is None else Segments.of(bounds, len(projected))
        mix = recomputed(self._mix)
        block, back = block_length(projected.shape[1], CHUNK), self.config.linear_conv_kernel_dim - 1
        outputs, state = [], None
        for start in range(0, len(projected), block):
            first, end = max(0, start - back), min(start + block, len(projected))
            part = None if segments is None else segments.part(start, end)
            output, state = mix(projected[first:end], start - first, part, state)
            outputs.append(output)
        return self.out_proj(back_to_ranks(outputs[0] if len(outputs) == 1 else torch.cat(outputs)))

    def _whole_rows(self, projected: Tensor, bounds: Tensor | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Exchange tokens for heads among the context-parallel ranks.

        Args:
            projected: [s / cp, b, output of in_proj]
            bounds: of the samples in a packed row, each of which the ranks share; None for rows of one sample.

        Returns:
            [s, b, output of in_proj / cp] in the order of the tokens, and the function that takes the input of out_proj
            [s, b, d / cp] to [s / cp, b, d].
        """
        if (size := self._cp.size()) == 1:
            return projected, lambda output: output
        length = len(projected) * size
        if bounds is None:
            bounds = torch.arange(2, device=projected.device) * length  # the host would wait for the copy of a list
        order, inverse = _build_thd_cp_a2a_perm(bounds, size, length)
        # One exchange for all sections: the share of each rank in all of them is contiguous.
        sections = projected.split(list(self._sections.values()), dim=-1)
        shares = torch.cat([section.unflatten(-1, (size, -1)) for section in sections], dim=-1).flatten(-2)
        common = {"seq_dim": 0, "head_dim": -1, "cp_group": self._cp}
        rows = tensor_a2a_cp2hp(shares, **common, undo_attention_load_balancing=False).index_select(0, order)

        def back_to_ranks(output: Tensor) -> Tensor:
            return tensor_a2a_hp2cp(output.index_select(0, inverse), **common, redo_attention_load_balancing=False)

        return rows, back_to_ranks

    def _of_own_heads(self, parameter: Tensor, sections: str | None = None) -> Tensor:
        """The rows of a parameter that belong to the heads of this context-parallel rank.

        Args:
            parameter: [channels or heads, ...]
            sections: names of the sections of its rows; None for one.
        """
        sizes = None if sections is None else [self._sections[name] for name in sections.split()]
        return get_parameter_local_cp(parameter, 0, self._cp, sizes)

    def _mix(
        self, projected: Tensor, earlier_tokens: int, segments: Segments | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A block of tokens between the projections.

        Args:
            projected: [n + s, b, output of in_proj]
            earlier_tokens: n, tokens before the block that the convolution reads.
            segments: of the s tokens.
            state: before the block; None for zeros.

        Returns:
            [s, b, input of out_proj] in the dtype of `projected`, and the state after the block.
        """
        projected, dtype = projected.transpose(0, 1), projected.dtype
        sizes = [self._own[name] for name in _CONVOLVED.split()]
        z, convolved, dt = projected.split([self._own["z"], sum(sizes), self._own["dt"]], dim=-1)
        z, dt = z[:, earlier_tokens:], dt[:, earlier_tokens:]
        taps, bias = (self._of_own_heads(one, _CONVOLVED) for one in (self.conv1d.weight, self.conv1d.bias))
        a_log, dt_bias, d, scale = map(self._of_own_heads, (self.A_log, self.dt_bias, self.D, self.norm.weight))
        x, b, c = causal_conv(convolved, taps[:, 0], bias, segments, earlier_tokens).split(sizes, dim=-1)
        x = x.unflatten(-1, (self._own["dt"], -1))
        b, c = (values.unflatten(-1, (self._groups, -1)) for values in (b, c))
        dt = F.softplus(dt.to(x.dtype) + dt_bias.to(x.dtype)).clamp(min=self._least_step)
        y, state = chunked_scan(x, dt, -a_log.to(x.dtype).exp(), b, c, segments, state)
        y = (y + x * d.to(x.dtype)[:, None]).flatten(-2)
        y = gated_group_norm(y, z.to(y.dtype), scale, self._groups, self.config.layernorm_epsilon)
        return y.to(dtype).transpose(0, 1), state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """As megatron's `MambaMixer`: sections of the rows of a parameter are tensors of their own."""
        state: ShardedStateDict = {}
        own = {name: value for name, value in self.state_dict(keep_vars=True).items() if "_proj." not in name}
        state |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj"):
            linear = getattr(self, name)
            state |= sharded_state_dict_default(
                linear, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tp
            )
        sections = {"in_proj.weight": "z x B C dt", "conv1d.weight": _CONVOLVED, "conv1d.bias": _CONVOLVED}
        for name, parts in sections.items():
            sizes = [self._sections[part] for part in parts.split()]
            state[f"{prefix}{name}"] = _split_tensor_factory(state[f"{prefix}{name}"], sizes, parts.split(), 0)
        return state


def _bounds(packed_seq_params: PackedSeqParams | None) -> Tensor | None:
    """[samples + 1] bounds of the samples in a packed row, over all context-parallel ranks; None for other rows."""
    if packed_seq_params is None:
        return None
    padded = packed_seq_params.cu_seqlens_q_padded
    return packed_seq_params.cu_seqlens_q if padded is None else padded


class _Parameters(nn.Module):
    """Parameters whose first axis is sharded over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(name, parameter)


def mixer_layer_spec(
    config: GPTModelConfig, vp_stage: int | None = None, *, options: LayerOptions
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage, each with the mixer that `options.layer_mixers` names and the norm before it.

    Args:
        config: the model.
        vp_stage: virtual pipeline stage.
        options: of the model's layers.
    """
    (block, layers), backend = numbered_layers(config.transformer, vp_stage), backend_of(config)
    specs = [
        replace(spec, submodules=_one_mixer(spec.submodules, options.layer_mixers[layer], backend, options))
        for layer, spec in zip(layers, block.layer_specs, strict=True)
    ]
    return replace(block, layer_specs=specs)


def _one_mixer(
    layer: TransformerLayerSubmodules, mixer: str, backend: BackendSpecProvider, options: LayerOptions
) -> TransformerLayerSubmodules:
    """A layer with the half that has the mixer. Norms are modules of their own under either backend, so that a
    checkpoint has one name of each."""
    norm, column = backend.layer_norm(rms_norm=True), backend.column_parallel_linear()
    if mixer in (MLP_ONLY, MIXTURE):
        mlp = layer.mlp
        if mixer == MLP_ONLY:
            mlp = partial(MLP.as_mlp_submodule, replace(mlp.keywords["submodules"], linear_fc1=column))
        return TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add)
    attention = layer.self_attention
    if mixer == MAMBA:
        linears = MambaSubmodules(in_proj=column, out_proj=backend.row_parallel_linear())
        attention = ModuleSpec(
            module=Mamba2Mixer, params={"least_step": options.least_time_step or 0.0}, submodules=linears
        )
    else:
        attention = replace(attention, submodules=replace(attention.submodules, linear_qkv=column))
    return TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
