"""GPT models in any layout for checkpoint tests: built, run stage by stage, taken down. For workers of the pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelConfig
from torch import Tensor

from mkd.config.flags import default_arguments
from mkd.cpu.flags import set_cpu_values
from mkd.models.gpt import gpt_config


@contextmanager
def layout(tp: int, pp: int, vp: int = 1, ep: int = 1, etp: int | None = None) -> Iterator[None]:
    """Megatron's groups for tensor, pipeline, virtual pipeline, expert and (tp by default) expert-tensor sizes."""
    ps.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        ps.destroy_model_parallel()
        # A backward pass without megatron's schedule leaves a scale here, of a shape that the schedule then trips over.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None


def config_from_arguments(
    architecture: dict[str, Any], ep: int = 1, dtype: torch.dtype = torch.float32
) -> GPTModelConfig:
    """Configuration, in the present layout, of the model that Megatron arguments describe."""
    args = default_arguments()
    vars(args).update(architecture)
    args.tensor_model_parallel_size = ps.get_tensor_model_parallel_world_size()
    args.pipeline_model_parallel_size = ps.get_pipeline_model_parallel_world_size()
    args.expert_model_parallel_size = ep
    args.expert_tensor_parallel_size = ps.get_expert_tensor_parallel_world_size()
    args.params_dtype, args.bf16 = dtype, dtype == torch.bfloat16
    args.perform_initialization = False
    multiple = 128 * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    set_cpu_values(args)
    config = gpt_config(args)
    config.parallel_output = False
    return config


def build_from_arguments(
    architecture: dict[str, Any], ep: int = 1, dtype: torch.dtype = torch.float32
) -> list[GPTModel]:
    """This rank's chunk of the model that Megatron arguments describe, as a job builds it."""
    config = config_from_arguments(architecture, ep, dtype)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    return [unwrap_model(chunk) for chunk in chunks]


def build_chunks(args: dict[str, Any], vp: int = 1, **changes: Any) -> list[GPTModel]:
    """This rank's chunks of the Llama model that Megatron arguments describe, on the local layer spec."""
    args = {**args, **changes}
    tp, pp = ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=args["num_layers"],
        hidden_size=args["hidden_size"],
        ffn_hidden_size=args["ffn_hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"],
        kv_channels=args["kv_channels"],
        layernorm_epsilon=args["layernorm_epsilon"],
        normalization=args["normalization"],
        add_qkv_bias=args["add_qkv_bias"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return [_chunk(config, args, stage, vp) for stage in range(vp)]


def _chunk(config: TransformerConfig, args: dict[str, Any], stage: int, vp: int) -> GPTModel:
    multiple = 128 * config.tensor_model_parallel_size
    padded = -(-args["vocab_size"] // multiple) * multiple
    rank, last = ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size() - 1
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.get("padded_vocab_size", padded),
        max_sequence_length=args["max_position_embeddings"],
        pre_process=rank == 0 and stage == 0,
        post_process=rank == last and stage == vp - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type="rope",
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args["rope_scaling_factor"],
        vp_stage=stage if vp > 1 else None,
    )


@torch.no_grad()
def run_stages(chunks: list[GPTModel], tokens: Tensor) -> Tensor | None:
    """[b, s, padded V] logits on the last pipeline stage, None elsewhere; tokens [b, s]."""
    rank, size, tp = (
        dist.get_rank(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_tensor_model_parallel_world_size(),
    )
    stage_of = ps.get_pipeline_model_parallel_rank()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()[None, None]
    hidden = torch.empty(tokens.shape[1], tokens.shape[0], chunks[0].config.hidden_size)
    stages = [(stage, chunk) for chunk in range(len(chunks)) for stage in range(size)]
    for n, (stage, chunk) in enumerate(stages):
        if stage != stage_of:
            continue
        base = rank - stage * tp
        if n > 0 and stages[n - 1][0] != stage:
            dist.recv(hidden, base + stages[n - 1][0] * tp)
        model = chunks[chunk].eval()
        model.set_input_tensor(hidden if n > 0 else None)
        out = model(tokens, positions, mask)
        if n == len(stages) - 1:
            return out
        hidden = out.contiguous()
        if stages[n + 1][0] != stage:
            dist.send(hidden, base + stages[n + 1][0] * tp)
    return None
