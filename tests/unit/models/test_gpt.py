"""mkd/models/gpt.py, and that megatron-core 0.19 still needs its corrections."""

from argparse import Namespace
from inspect import signature
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.training.argument_utils import gpt_config_from_args
from torch import Tensor, nn

from mkd.config import flags
from mkd.errors import MkdConfigError
from mkd.models.gpt import gpt_config, logit_scale
from mkd.models.parameter_sync import gather_parameters


def arguments(**values: Any) -> Namespace:
    args = flags.default_arguments()
    vars(args).update(num_layers=2, hidden_size=32, num_attention_heads=2, params_dtype=torch.float32)
    vars(args).update(padded_vocab_size=128, apply_rope_fusion=False, **values)
    return args


def test_parameters_are_gathered_where_a_forward_pass_would_gather_them() -> None:
    """A chunk without the wrapper, one whose hooks are off, as in the first iteration, and one whose hooks are on."""
    gathered: list[tuple[str, bool]] = []
    plain, *wrapped = (nn.Linear(1, 1) for _ in range(3))
    for name, chunk, handles in zip(("off", "on"), wrapped, ({}, {"module": "handle"}), strict=True):
        chunk.remove_forward_pre_hook_handles = handles
        chunk.start_param_sync = lambda force_sync, name=name: gathered.append((name, force_sync))
    gather_parameters([plain, *wrapped])
    assert gathered == [("on", True)]


def test_upstream_ignores_the_rope_scaling_factor() -> None:
    args = arguments(use_rope_scaling=True, rope_scaling_factor=32.0)
    assert gpt_config_from_args(args).rope_scaling_factor == 8.0
    assert gpt_config(args).rope_scaling_factor == 32.0


def test_upstream_reads_no_position_ids_for_rope() -> None:
    """The reason why --reset-position-ids is refused with it."""
    assert "position_ids" not in signature(RotaryEmbedding.forward).parameters


@pytest.mark.parametrize("rope", ["rope", "yarn"])
def test_rope_fusion_of_latent_attention_is_for_yarn(rope: str) -> None:
    latent = dict(multi_latent_attention=True, rope_type=rope, q_lora_rank=8, kv_lora_rank=8, normalization="RMSNorm")
    args = arguments(**latent)
    args.apply_rope_fusion = True
    assert gpt_config(args).transformer.apply_rope_fusion == (rope == "yarn")


def test_biases_of_a_squared_relu_are_not_fused() -> None:
    """Megatron refuses the fusion that is its default, so that no such model could be built on a GPU."""
    args = arguments(squared_relu=True, add_bias_linear=True)
    args.bias_gelu_fusion = True
    config = gpt_config(args).transformer
    assert config.add_bias_linear and not config.bias_activation_fusion


@pytest.mark.parametrize("experts", [{"quick_geglu": True}, {}], ids=["gpt-oss", "gelu"])
def test_grouped_experts_with_biases(experts: dict[str, Any]) -> None:
    """Megatron refuses them with the fusion that is its default, so that none could be built on a GPU."""
    args = arguments(num_experts=4, moe_grouped_gemm=True, add_bias_linear=True, moe_ffn_hidden_size=64, **experts)
    args.bias_dropout_fusion, args.swiglu, args.bias_gelu_fusion = True, False, False
    submodules = GroupedMLPSubmodules(*[lambda *sizes, **options: nn.Identity()] * 2)
    groups = ProcessGroupCollection(ep=None, expt_tp=None)
    with pytest.raises(AssertionError, match="bias_dropout_fusion is not supported"):
        TEGroupedMLP(4, gpt_config_from_args(args).transformer, submodules, groups)
    TEGroupedMLP(4, gpt_config(args).transformer, submodules, groups)
    assert args.bias_dropout_fusion is True


def gpt_oss_activation(values: Tensor, weights: Tensor, limit: float) -> Tensor:
    """As in transformers; values: [tokens, gate and up]."""
    gate, up = values.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0) * weights


@pytest.mark.parametrize("grouped", [False, True])
def test_clamped_activations_with_biases(grouped: bool) -> None:
    """Megatron's fused activation clamps before it adds the bias, which experts one after another leave to it."""
    generator = torch.Generator().manual_seed(1)
    values, weights = torch.randn(8, 12, generator=generator), torch.rand(8, 1, generator=generator)
    bias = torch.full((12,), 0.5)
    plain = weighted_bias_quick_geglu_impl(values, None, weights, linear_offset=1.0, clamp_value=1.0)
    assert torch.allclose(plain, gpt_oss_activation(values, weights, 1.0))
    biased = weighted_bias_quick_geglu_impl(values, bias, weights, linear_offset=1.0, clamp_value=1.0)
    assert not torch.allclose(biased, gpt_oss_activation(values + bias, weights, 1.0), atol=0.1)
    args = arguments(num_experts=4, moe_ffn_hidden_size=64, add_bias_linear=True, quick_geglu=True, swiglu=False)
    args.activation_func_clamp_value, args.moe_grouped_gemm = 1.0, grouped
    args.bias_gelu_fusion = True
    assert gpt_config(args).transformer.bias_activation_fusion == grouped


@pytest.mark.parametrize("other", ["moe_grouped_gemm", "add_bias_linear"])
def test_other_experts_keep_the_fusion(other: str) -> None:
    args = arguments(num_experts=4, moe_grouped_gemm=True, add_bias_linear=True, moe_ffn_hidden_size=64)
    args.bias_dropout_fusion, args.bias_gelu_fusion = True, False
    setattr(args, other, False)
    assert gpt_config(args).transformer.bias_dropout_fusion is True


def test_softcap_of_the_logits() -> None:
    assert logit_scale(gpt_config(arguments(logit_softcap=30.0)).transformer) == (1.0, 30.0)
    assert logit_scale(gpt_config(arguments()).transformer) == (1.0, None)


def test_embedding_scale_is_rounded_as_in_transformers() -> None:
    values = dict(use_mup=True, mup_embedding_mult=48**0.5, embedding_scale_in_params_dtype=True)
    assert gpt_config(arguments(**values)).transformer.mup_embedding_mult == pytest.approx(48**0.5, rel=1e-7)
    half = gpt_config(arguments(**values | {"params_dtype": torch.bfloat16, "bf16": True}))
    assert half.transformer.mup_embedding_mult == 6.9375


def test_attention_backend_without_softcap_is_refused() -> None:
    with pytest.raises(MkdConfigError, match=r"--attention-backend local .* no softcap"):
        gpt_config(arguments(attention_softcap=50.0, attention_backend=AttnBackend.local))


def test_yarn_without_fused_rope() -> None:
    """A teacher with yarn beside a student with plain rope, which uses fused kernels."""
    args = flags.default_arguments()
    vars(args).update(num_layers=2, hidden_size=32, num_attention_heads=2, params_dtype=torch.float32)
    vars(args).update(position_embedding_type="yarn", padded_vocab_size=128, apply_rope_fusion=True)
    assert gpt_config(args).transformer.apply_rope_fusion is False
    assert args.apply_rope_fusion is True
