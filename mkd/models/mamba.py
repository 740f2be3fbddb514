"""Models whose layers each have one mixer: Mamba 2, attention, an MLP or a mixture of experts (Nemotron-H).

Each is a Megatron transformer layer whose other half is the identity, so that the model is a GPTModel with the layer
numbers of the Hugging Face folder. megatron-core 0.19's `MambaMixer` needs the package mamba_ssm, also to be built, and
computes without a lower limit of the time step, which transformers has: the mixer here is mkd's own, computed by
PyTorch's operations on CPU and GPU.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
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
from torch.utils.checkpoint import checkpoint

from mkd.models.layer_options import MAMBA, MIXTURE, MLP_ONLY, LayerOptions
from mkd.models.layer_specs import backend_of, numbered_layers
from mkd.models.state_space import BLOCK, CHUNK, Segments, causal_conv, chunked_scan, gated_group_norm


@dataclass
class MambaSubmodules:
    """The linear layers of a Mamba 2 mixer."""

    in_proj: type
    out_proj: type


class Mamba2Mixer(MegatronModule):
    """A Mamba 2 mixer in place of self-attention; tensor parallelism shards heads and groups.

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
        self._tp, self._least_step, self.layer_number = pg_collection.tp, least_step, layer_number
        size = self._tp.size()
        self._heads, self._groups = config.mamba_num_heads // size, config.mamba_num_groups // size
        inner, states = self._heads * config.mamba_head_dim, self._groups * config.mamba_state_dim
        self._sections = {"z": inner, "x": inner, "B": states, "C": states, "dt": self._heads}
        self._convolved = inner + 2 * states
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
        kernel = (self._convolved, 1, config.linear_conv_kernel_dim)
        self.conv1d = _Parameters(config, weight=kernel, bias=(self._convolved,))
        self.norm = _Parameters(config, weight=(inner,))
        per_head = _Parameters(config, dt_bias=(self._heads,), A_log=(self._heads,), D=(self._heads,))
        for name, parameter in per_head.named_parameters():
            self.register_parameter(name, parameter)
        if config.perform_initialization:
            self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        first = self._tp.rank() * self._heads + 1
        self.A_log.copy_(torch.arange(first, first + self._heads, device=self.A_log.device).log())
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
        """As attention: [s, b, H] -> (output [s, b, H], no bias); s / tp under sequence parallelism."""
        projected, _ = self.in_proj(hidden_states)
        segments = None
        if packed_seq_params is not None:
            padded = packed_seq_params.cu_seqlens_q_padded
            bounds = packed_seq_params.cu_seqlens_q if padded is None else padded
            segments = Segments.of(bounds, len(projected))
        mix = self._mix
        if torch.is_grad_enabled():
            mix = partial(checkpoint, self._mix, use_reentrant=False, preserve_rng_state=False)
        block, back = block_length(projected.shape[1]), self.config.linear_conv_kernel_dim - 1
        outputs, state = [], None
        for start in range(0, len(projected), block):
            first, end = max(0, start - back), min(start + block, len(projected))
            part = None if segments is None else segments.part(start, end)
            output, state = mix(projected[first:end], start - first, part, state)
            outputs.append(output)
        return self.out_proj(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

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
        z, convolved, dt = projected.split([self._sections["z"], self._convolved, self._heads], dim=-1)
        z, dt = z[:, earlier_tokens:], dt[:, earlier_tokens:]
        convolved = causal_conv(convolved, self.conv1d.weight[:, 0], self.conv1d.bias, segments, earlier_tokens)
        x, b, c = convolved.split([self._sections[name] for name in ("x", "B", "C")], dim=-1)
        x = x.unflatten(-1, (self._heads, -1))
        b, c = (values.unflatten(-1, (self._groups, -1)) for values in (b, c))
        dt = F.softplus(dt.to(x.dtype) + self.dt_bias.to(x.dtype)).clamp(min=self._least_step)
        y, state = chunked_scan(x, dt, -self.A_log.to(x.dtype).exp(), b, c, segments, state)
        y = (y + x * self.D.to(x.dtype)[:, None]).flatten(-2)
        y = gated_group_norm(y, z.to(y.dtype), self.norm.weight, self._groups, self.config.layernorm_epsilon)
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
        sections = {"in_proj.weight": "z x B C dt", "conv1d.weight": "x B C", "conv1d.bias": "x B C"}
        for name, parts in sections.items():
            sizes = [self._sections[part] for part in parts.split()]
            state[f"{prefix}{name}"] = _split_tensor_factory(state[f"{prefix}{name}"], sizes, parts.split(), 0)
        return state


def block_length(rows: int) -> int:
    """Tokens of each of `rows` rows that a mixer computes at one time."""
    return max(1, BLOCK // (rows * CHUNK)) * CHUNK


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
