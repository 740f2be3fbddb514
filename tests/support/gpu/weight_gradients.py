"""Gradients of small students in Megatron's DDP, before and after Transformer Engine's layers accumulate them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.hf.families import family_by_name
from mkd.compat.weight_gradients import accumulate_in_layers
from mkd.config.flags import default_arguments
from mkd.config.lora import LoraOptions
from mkd.cpu import is_active
from mkd.cpu.flags import set_cpu_values
from mkd.models.gpt import gpt_config
from mkd.models.lora import Lora

VOCAB, ROWS, LENGTH, MICROBATCHES = 512, 2, 128, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Student:
    """A student and how it is trained."""

    family: str = "Qwen2ForCausalLM"
    """Qwen2 has biases."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of Megatron."""
    dtype: torch.dtype = torch.bfloat16
    lora: bool = False

    def build(self) -> nn.Module:
        """The model in Megatron's DDP on one rank, with random weights."""
        family = family_by_name(self.family)
        architecture = family.megatron_args({**SIZES, **self.sizes})
        args = default_arguments()
        vars(args).update(architecture | self.args)
        args.params_dtype, args.bf16 = self.dtype, self.dtype == torch.bfloat16
        args.seq_length, args.micro_batch_size, args.padded_vocab_size = LENGTH, ROWS, VOCAB
        args.gradient_accumulation_fusion, args.calculate_per_token_loss = False, True
        args.attention_dropout = args.hidden_dropout = 0.0
        if is_active():
            set_cpu_values(args)
        config = gpt_config(args)
        config.parallel_output = False
        if self.lora:
            options = LoraOptions(8, 8.0)
            config.pre_wrap_hooks.append(Lora(options, adapted_linears(family, architecture, options), seed=1).attach)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=100_000
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (chunk,) = config.get_builder_cls()(config).build_distributed_models(
            groups, ddp, data_parallel_random_init=False
        )
        return chunk.train()


@dataclass(frozen=True)
class Gradients:
    """One step of several microbatches."""

    losses: list[float]
    values: dict[str, Tensor]
    """`main_grad` of each trained parameter, on the host."""

    def differences(self, other: "Gradients") -> dict[str, float]:
        """Relative differences in the 2-norm, by parameter; those of zero gradients are absolute."""
        assert self.values.keys() == other.values.keys()
        norm = torch.linalg.vector_norm
        return {
            name: (norm(value - other.values[name]) / (norm(other.values[name]) or 1.0)).item()
            for name, value in self.values.items()
        }


Extra = Callable[[GPTModel], Tensor | float]


def step(chunk: nn.Module, extra: Extra = lambda model: 0.0) -> Gradients:
    """Forward and backward passes as Megatron's schedule runs them; `extra` is added to each loss."""
    model, generator = unwrap_model(chunk), torch.Generator().manual_seed(2)
    chunk.zero_grad_buffer()
    model.set_is_first_microbatch()
    losses = []
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None] if is_active() else None
    device = next(chunk.parameters()).device
    positions = torch.arange(LENGTH, device=device).expand(ROWS, LENGTH)

    def run() -> None:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
        upstream = torch.randn(ROWS, LENGTH, VOCAB, generator=generator)
        logits = chunk(tokens.to(device), positions, mask)
        loss = (logits.float() * upstream.to(device)).sum() / 100.0
        losses.append(loss.item())
        (loss + extra(model)).backward()

    with chunk.no_sync():
        for _ in range(MICROBATCHES - 1):
            run()
    run()
    chunk.finish_grad_sync()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    found = {name: own.main_grad.float().cpu().clone() for name, own in chunk.named_parameters() if own.requires_grad}
    return Gradients(losses, found)


@dataclass(frozen=True)
class Comparison:
    """Steps of one student."""

    plain: list[Gradients]
    """Two steps without."""
    fused: list[Gradients]
    """Two steps with."""
    weights: list[str]
    """Those that Transformer Engine's layers accumulate."""

    def worst(self) -> tuple[str, float]:
        """The parameter with the largest difference, and the difference."""
        found = [one for fused in self.fused for one in fused.differences(self.plain[0]).items()]
        return max(found, key=lambda one: one[1])

    def noise(self) -> float:
        """The largest difference of the two steps without."""
        return max(self.plain[1].differences(self.plain[0]).values())


def compare(student: Student) -> Comparison:
    """Steps without and with accumulation in the layers; weights do not change."""
    torch.manual_seed(1)
    chunk = student.build()
    plain = [step(chunk), step(chunk)]
    weights = accumulate_in_layers([chunk])
    return Comparison(plain, [step(chunk), step(chunk)], weights)


STUDENTS = {
    "dense": Student(),
    "dense, fp32": Student(dtype=torch.float32),
    "dense, tied": Student(sizes={"tie_word_embeddings": True}),
    "dense, recomputed": Student(args=RECOMPUTED),
    "latent attention": Student(
        "DeepseekV3ForCausalLM",
        sizes={
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 128,
        },
    ),
    "experts": Student("Qwen3MoeForCausalLM", sizes=EXPERTS, args={"moe_grouped_gemm": True}),
    "experts, one after another": Student("Qwen3MoeForCausalLM", sizes=EXPERTS),
    "FP8": Student(args={"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "FP8, experts": Student(
        "Qwen3MoeForCausalLM", EXPERTS, {"moe_grouped_gemm": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    ),
    "LoRA": Student(lora=True),
}
