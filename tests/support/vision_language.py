"""Tiny random vision-language models in Hugging Face folders."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.support.hf_folders import SIZES, change_weights, read_weights
from tests.support.hf_models import HYBRID, LLAMA4, LLAMA4_ROPE, MINISTRAL3_ROPE, SHARED_EXPERT

# transformers 5.24's whole Llama 4 reads this attribute of the output of its text model, which does not have it.
MoeCausalLMOutputWithPast.image_outputs = None
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48}
SIGLIP = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
VISION_SIZES = {"hidden_size": 32, "intermediate_size": 24}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16, **VISION_SIZES, **SIGLIP}
TEXT = {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"} | {"num_hidden_layers": 2}
QWEN2_TEXT = {name: value for name, value in TEXT.items() if name != "head_dim"}
"""transformers derives the width of a head from hidden_size."""


def mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


QWEN3_VISION = QWEN_VISION | {"intermediate_size": 24, "num_position_embeddings": 16}
HYBRID_TEXT = TEXT | HYBRID | {"layer_types": ["full_attention", "linear_attention"]}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GLM_VISION = QWEN_VISION | {"intermediate_size": 24, "image_size": 16}
CLIP = {"model_type": "clip_vision_model", **VISION_SIZES, **SIGLIP, "projection_dim": 24}
WHOLE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": QWEN2_TEXT | mrope(1, 1, 2),
        "vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 48},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": QWEN2_TEXT | mrope(1, 1, 2),
        "vision_config": QWEN_VISION | {"intermediate_size": 24, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": TEXT | mrope(3, 3, 2),
        "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": TEXT
        | mrope(3, 3, 2)
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "decoder_sparse_step": 1},
        "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"model_type": "qwen3_5", "text_config": HYBRID_TEXT, "vision_config": QWEN3_VISION},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": HYBRID_TEXT
        | SHARED_EXPERT
        | {"num_experts_per_tok": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 8},
        "vision_config": QWEN3_VISION,
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": TEXT
        | {
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": VISION_SIZES | SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": 7},
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "model_type": "mistral3",
        "text_config": TEXT | {"model_type": "ministral3", "rope_parameters": MINISTRAL3_ROPE},
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "pixtral": {
        "model_type": "llava",
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": PIXTRAL,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": TEXT | LLAMA4 | {"rope_parameters": LLAMA4_ROPE | {"high_freq_factor": 1.0}},  # as Scout
        "vision_config": VISION_SIZES
        | SIGLIP
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
    "glm4v": {
        "model_type": "glm4v",
        "text_config": QWEN2_TEXT
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1],
            }
        },
        "vision_config": GLM_VISION,
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "text_config": TEXT
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 28,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision_config": GLM_VISION,
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": CLIP,
        "image_grid_pinpoints": [[16, 16]],
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "text_config": QWEN2_TEXT | {"model_type": "qwen2"},
        "vision_config": {"model_type": "siglip_vision_model", **VISION_SIZES, **SIGLIP},
        "image_grid_pinpoints": [[16, 16]],
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION_SIZES | SIGLIP,
        "scale_factor": 2,
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION_SIZES | SIGLIP,
        "scale_factor": 2,
    },
    "internvl": {
        "model_type": "internvl",
        "text_config": QWEN2_TEXT | {"model_type": "qwen2"},
        "vision_config": VISION_SIZES | SIGLIP | {"image_size": [16, 16], "patch_size": [4, 4]},
        "tie_word_embeddings": False,
    },
}
"""Name -> keys of config.json."""
WHOLE["glm46v"] = WHOLE["glm4v"] | {
    "model_type": "glm46v",
    "text_config": WHOLE["glm4v"]["text_config"] | {"model_type": "glm4v_text"},
    "vision_config": {"model_type": "glm4v_vision", **GLM_VISION},
}
PUBLISHED = "qwen3_vl_moe, published"
"""The tensors of its experts are [experts, in, out], as on the hub; transformers 5 writes [experts, out, in]."""
WHOLE[PUBLISHED] = WHOLE["qwen3_vl_moe"]


def whole_config(sizes: dict[str, Any], **text: Any) -> PretrainedConfig:
    """Configuration of a whole model; `text` changes keys of `text_config`."""
    return AutoConfig.for_model(**{**sizes, "text_config": {**sizes["text_config"], **NO_TOKENS, **text}})


def build_whole(name: str, **text: Any) -> nn.Module:
    """A random model; `text` changes keys of `text_config`."""
    model = AutoModelForImageTextToText.from_config(whole_config(WHOLE[name], **text), attn_implementation="eager")
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for param in model.parameters():
            low = 0.5 if param.dim() == 1 else -0.5
            param.uniform_(low, low + 1.0, generator=generator)
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.uniform_(-0.5, 0.5, generator=generator)
    return model.eval()


def make_whole(folder: Path, name: str, dtype: torch.dtype = torch.float32, **text: Any) -> nn.Module:
    """Save a random model; see `build_whole`."""
    model = build_whole(name, **text).to(dtype)
    for key, value in model.named_buffers():
        if key.endswith("e_score_correction_bias"):  # stored in fp32 with weights of any dtype
            value.data = value.data.float()
    model.save_pretrained(folder)
    if name == PUBLISHED:
        experts = {key: value for key, value in read_weights(folder).items() if ".experts." in key}
        change_weights(folder, {key: value.transpose(1, 2).contiguous() for key, value in experts.items()})
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    return model
