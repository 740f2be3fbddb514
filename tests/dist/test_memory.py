"""The memory estimate against real models: their parameters, and the tensors that autograd keeps."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.config.flags import default_arguments
from mkd.cpu.flags import set_cpu_values
from mkd.job.memory.activations import kept_by_layers
from mkd.job.memory.parameters import parameters_of_stage
from mkd.models import delta_rule, mamba
from tests.dist.test_hf_families import DEEPSEEK, GEMMA3, GPT_OSS
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.hf_folders import make_model
from tests.support.hf_models import HYBRID_MODELS, MIXER_MODELS, NEAR_MODELS

FAMILIES = {
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen2": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "olmo2": {"num_hidden_layers": 2},
    "gemma3_text": GEMMA3,
    **{sizes["model_type"]: sizes for sizes in HYBRID_MODELS.values()},
    **MIXER_MODELS,
    **{NEAR_MODELS[name]["model_type"]: NEAR_MODELS[name] for name in ("olmoe", "cohere 2", "llama 4")},
}
LENGTH, SAMPLES = 48, 2
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


CASES = [("llama", 2, 1), ("llama", 1, 2), ("qwen2", 2, 1), ("qwen3", 2, 1), ("mixtral", 2, 1), ("deepseek_v3", 1, 2)]
CASES += [("gpt_oss", 1, 2), ("olmo2", 2, 1), ("gemma3_text", 1, 2)]
CASES += [("qwen3_next", 1, 2), ("qwen3_5_text", 2, 1), ("nemotron-h", 2, 1), ("nemotron 3 nano", 1, 2)]
CASES += [("qwen3_5_moe_text", 1, 2), ("olmoe", 2, 1), ("cohere2", 1, 2), ("cohere2", 2, 1), ("llama4_text", 1, 2)]


def counts(rank: int, size: int, path: str, tp: int, pp: int) -> tuple[int, float]:
    """(parameters of this rank's model, estimated parameters)."""
    architecture = read_architecture(HFFolder(path, "--hf"))[1]
    with layout(tp, pp):
        (model,) = build_from_arguments(architecture)
        args = default_arguments()
        vars(args).update(architecture, virtual_pipeline_model_parallel_size=None, world_size=size)
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
        args.padded_vocab_size = -(-args.vocab_size // (128 * tp)) * 128 * tp
        return sum(p.numel() for p in model.parameters()), parameters_of_stage(args, rank // tp).total


@pytest.mark.parametrize("family, tp, pp", CASES)
def test_parameters_of_every_rank(gloo_pool, tmp_path, family, tp, pp):
    sizes = {name: value for name, value in FAMILIES[family].items() if name != "model_type"}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    model_type = FAMILIES[family].get("model_type", family)
    folder = make_model(tmp_path / "hf", model_type, **{**sizes, **tokens})
    for built, estimated in gloo_pool(2).run(counts, folder, tp, pp):
        # The estimate omits small parameters such as the router's bias and attention sinks.
        assert estimated == pytest.approx(built, rel=2e-3)


DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXERS = {
    "layer_mixers": ["M", "-"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
    "linear_conv_kernel_dim": 4,
    "swiglu": False,
    "squared_relu": True,
    "position_embedding_type": "none",
}


PARALLEL_BLOCK = {"parallel_block": True, "normalization": "LayerNorm"}


def saved(rank: int, size: int, tp: int, sequence_parallel: bool, changes: dict) -> tuple[int, float]:
    """(bytes that autograd keeps of a Llama's layers, counting each storage once and no parameters; the estimate)."""
    architecture = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 160,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 128,
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": LENGTH,
        "sequence_parallel": sequence_parallel,
    } | changes
    with layout(tp, 1):
        (model,) = build_from_arguments(architecture)
        kept: dict[int, int] = {}
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and tensor.is_floating_point():
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        hidden = torch.randn(LENGTH // (tp if sequence_parallel else 1), SAMPLES, 64, requires_grad=True)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        rope = None
        if architecture["position_embedding_type"] == "rope":
            rope = model.rotary_pos_emb(LENGTH)
            known.add(rope.untyped_storage().data_ptr())
        # Recomputation without reentrance keeps its inputs out of sight of the hooks.
        for module in (mamba, delta_rule):
            module.checkpoint = lambda *args, **options: checkpoint(*args, **options | {"use_reentrant": True})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for layer in model.decoder.layers:
                hidden, _ = layer(hidden, mask, rotary_pos_emb=rope)
        args = default_arguments()
        set_cpu_values(args)
        vars(args).update(architecture, params_dtype=torch.float32, seq_length=LENGTH, micro_batch_size=SAMPLES)
        args.tensor_model_parallel_size = tp
        return sum(kept.values()), kept_by_layers(args, range(2), on_gpu=False)


@pytest.mark.parametrize(
    "tp, sequence_parallel, changes",
    [
        *[(1, False, {}), (2, False, {}), (2, True, {}), (1, False, EXPERTS)],
        *[(1, False, DELTA_NET), (2, True, DELTA_NET)],
        *[(1, False, PARALLEL_BLOCK), (2, True, PARALLEL_BLOCK)],
        *[(1, False, MIXERS), (2, True, MIXERS)],
        *[(1, False, {"qk_layernorm": True}), (1, False, {"whole_width_qk_norms": True})],
        (1, False, EXPERTS | {"qk_l2_norm": True}),  # local layers of dense models have no such norms
    ],
)
def test_bytes_kept_by_layers(gloo_pool, tp, sequence_parallel, changes):
    """On CPU: attention keeps its scores, and no kernels are fused."""
    for kept, estimated in gloo_pool(2).run(saved, tp, sequence_parallel, changes):
        assert estimated == pytest.approx(kept, rel=0.15 if changes is DELTA_NET else 0.05)
