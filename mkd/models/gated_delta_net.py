"""Hybrid models of Qwen3-Next and Qwen3.5: layers with a gated delta net, and every few layers one with attention.

The modules are megatron-core's. Its layer specs for them serve Transformer Engine only; these serve local layers too.
On GPUs, the module computes with kernels of flash-linear-attention; `mkd.models.delta_rule` stands in for them on CPU,
and where the package is missing or refuses.
"""

import copy
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core.jit import jit_fuser
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models import GPTModelConfig
from torch import Tensor
from torch.nn import functional as F

from mkd.models import delta_rule
from mkd.models.layer_specs import backend_of, numbered_layers
from mkd.models.parameter_sync import finish_parameter_sync

VARIANT = "gated_delta_net"
"""Megatron's name (`experimental_attention_variant`)."""


class DeltaNet(GatedDeltaNet):
    """Megatron's gated delta net as transformers computes it, with the gradients of all heads in the output norm."""

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, *args: Any, out_norm: Any, **options: Any
    ) -> None:
        """See megatron's `GatedDeltaNet`.

        Args:
            config: of the model.
            submodules: without the norm of the output.
            args: as in megatron.
            out_norm: builder of the norm of each head's output. Its weight is not the difference from 1, also where
                `layernorm_zero_centered_gamma` makes those of the other norms one.
            options: as in megatron.
        """
        delta_rule.install_if_needed()
        super().__init__(config, submodules, *args, **options)
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        self.out_norm = out_norm(config=plain, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon)
        if self.tp_size > 1 and not config.sequence_parallel:
            # Each tensor-parallel rank has heads of its own. megatron-core 0.19 sums the gradients of this norm over
            # the ranks under sequence parallelism only.
            self.out_norm.weight.register_hook(self._sum_over_ranks)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """See megatron's `GatedDeltaNet`, which in 0.19 reads the convolution's parameters without calling it."""
        finish_parameter_sync(self.conv1d)
        return super().forward(*args, **options)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self._kernel, self.gated_delta_rule = self.gated_delta_rule, self._delta_rule
        deterministic = self.config.deterministic_mode
        self._has_kernel = {
            is_trained: delta_rule.missing_kernel(is_trained, deterministic) is None for is_trained in (False, True)
        }

    def _delta_rule(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron's function, or PyTorch's operations where there is no kernel."""
        rule = self._kernel if self._has_kernel[self.training] else delta_rule.chunk_gated_delta_rule
        return rule(*tensors, **options)

    def _sum_over_ranks(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.pg_collection.tp)
        return total

    @jit_fuser
    def _compute_g_and_beta(self, a_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Decays in fp32 for parameters of any dtype, as in transformers; megatron takes exp(a_log) in theirs."""
        return -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float()), beta.sigmoid()


def hybrid_layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's layers of a pipeline stage, those with linear attention changed to a gated delta net.

    Args:
        config: the model.
        vp_stage: virtual pipeline stage.
    """
    transformer, backend = config.transformer, backend_of(config)
    attention_only = copy.copy(transformer)
    attention_only.experimental_attention_variant = None
    block, layers = numbered_layers(attention_only, vp_stage)
    pattern = get_linear_attention_pattern(transformer)
    specs = [
        _with_delta_net(spec, backend) if pattern[layer] else spec
        for layer, spec in zip(layers, block.layer_specs, strict=True)
    ]
    return replace(block, layer_specs=specs)


def _with_delta_net(layer: ModuleSpec, backend: BackendSpecProvider) -> ModuleSpec:
    norm: LayerNormBuilder = backend.layer_norm(rms_norm=True)
    fused = backend.fuse_layernorm_and_linear()
    attention = ModuleSpec(
        module=DeltaNet,
        params={"out_norm": norm},
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear() if fused else backend.column_parallel_linear(),
            out_norm=IdentityOp,
            out_proj=backend.row_parallel_linear(),
        ),
    )
    names = {
        name: stored.replace("linear_qkv", "in_proj")
        for name, stored in layer.submodules.sharded_state_dict_keys_map.items()
    }
    submodules = replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map=names)
    return replace(layer, submodules=submodules)
