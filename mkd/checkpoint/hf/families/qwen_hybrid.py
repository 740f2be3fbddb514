"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, in every fourth layer attention with a gate instead,
norms with weights of 1 + w, partial rope.

Sources: transformers, models/qwen3_next, models/qwen3_5 and models/qwen3_5_moe.
"""

from mkd.checkpoint.hf.config_json.parts import (
    EXPERT_FFN,
    FFN,
    NORMALIZED_ROUTER,
    OPTIONAL_NORMALIZED_ROUTER,
    SHARED_EXPERT,
    SILU,
    SIZES,
    experts,
    required,
)
from mkd.checkpoint.hf.config_json.rope import PARTIAL_ROPE, ROPE
from mkd.checkpoint.hf.families.delta_net import DELTA_NET, JOINED_PROJECTION, SEPARATE_PROJECTIONS, hybrid_attention
from mkd.checkpoint.hf.families.family import DENSE, MIXTURE, Family, but
from mkd.checkpoint.hf.families.mixtures import NUM_EXPERTS, SHARED_EXPERT_LAYER
from mkd.checkpoint.hf.tables import EMBEDDING, FINAL_NORM, HEAD, MLP, MLP_NORM

_HYBRID = {
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}
_ABSENT = {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25}
_PLAIN = required(attention_bias=False)
_MTP = ("mtp.",)
_MIXTURE = (EXPERT_FFN, experts("num_experts"), NUM_EXPERTS, SHARED_EXPERT)
_FIXED_MIXTURE = but(
    MIXTURE, "moe_shared_expert_intermediate_size", "rotary_percent", moe_shared_expert_gate=True, **_HYBRID
)
QWEN3_NEXT = Family(
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    parts=(
        *(SIZES, *_MIXTURE, OPTIONAL_NORMALIZED_ROUTER, DELTA_NET, ROPE, PARTIAL_ROPE, SILU, _PLAIN),
        required(decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    table=(EMBEDDING, *hybrid_attention(JOINED_PROJECTION), *SHARED_EXPERT_LAYER, FINAL_NORM, HEAD),
    fixed=_FIXED_MIXTURE,
    left_out=_MTP,
    absent={**_ABSENT, "num_key_value_heads": 2, "norm_topk_prob": True},
)
QWEN3_5 = Family(
    architectures=("Qwen3_5ForCausalLM",),
    model_type="qwen3_5_text",
    parts=(SIZES, FFN, DELTA_NET, ROPE, PARTIAL_ROPE, SILU, _PLAIN),
    table=(EMBEDDING, *hybrid_attention(SEPARATE_PROJECTIONS), MLP_NORM, *MLP, FINAL_NORM, HEAD),
    fixed=but(DENSE, "rotary_percent", **_HYBRID),
    left_out=_MTP,
    absent=_ABSENT,
)
QWEN3_5_MOE = Family(
    architectures=("Qwen3_5MoeForCausalLM",),
    model_type="qwen3_5_moe_text",
    parts=(SIZES, *_MIXTURE, NORMALIZED_ROUTER, DELTA_NET, ROPE, PARTIAL_ROPE, SILU, _PLAIN),
    table=(EMBEDDING, *hybrid_attention(SEPARATE_PROJECTIONS), *SHARED_EXPERT_LAYER, FINAL_NORM, HEAD),
    fixed=_FIXED_MIXTURE,
    left_out=_MTP,
    absent={**_ABSENT, "num_key_value_heads": 2},
)
