"""Gemma 2 and the text models of Gemma 3: norms around attention and MLP with weights of 1 + w, scaled embeddings, GLUs
with GELU, sliding windows in some layers, softcaps (Gemma 2), and in Gemma 3 norms of queries and keys and two ropes.

Sources: transformers, models/gemma2 and models/gemma3.
"""

from dataclasses import replace
from typing import Any

from mkd.checkpoint.hf.config_json.layer_ropes import LINEAR_AND_LOCAL_ROPE
from mkd.checkpoint.hf.config_json.parts import FFN, SIZES, Arguments, ConfigPart, required
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import PLAIN_ROPE
from mkd.checkpoint.hf.config_json.windows import ALTERNATING_WINDOWS, layer_windows
from mkd.checkpoint.hf.families.family import ATTENTION, DENSE, Family, but
from mkd.checkpoint.hf.families.olmo import ATTENTION_POST_NORM, MLP_POST_NORM
from mkd.checkpoint.hf.tables import ATTENTION_OUT, HEAD_NORMS, MLP, MLP_NORM, QKV_WEIGHT, decoder
from mkd.errors import MkdCheckpointError


def _read_scales(config: ConfigReader) -> dict[str, Any]:
    return {
        "mup_embedding_mult": config.size("hidden_size") ** 0.5,
        "softmax_scale": config.size("query_pre_attn_scalar", default=256) ** -0.5,
        "logit_softcap": _softcap(config, "final_logit_softcapping"),
    }


def _softcap(config: ConfigReader, key: str) -> float | None:
    softcap = config.get(key, (int, float), None)
    if softcap is not None and not softcap > 0:
        raise config.fail(key, softcap, "it must be above 0, or null")
    return None if softcap is None else float(softcap)


def _write_scales(args: Arguments) -> dict[str, Any]:
    if abs(args["mup_embedding_mult"] ** 2 - args["hidden_size"]) > 1e-6 * args["hidden_size"]:
        raise MkdCheckpointError(
            f"Gemma multiplies its embeddings by the square root of the width, {args['hidden_size']}; the checkpoint "
            f"was made with --mup-embedding-mult {args['mup_embedding_mult']}"
        )
    return {
        "query_pre_attn_scalar": round(args["softmax_scale"] ** -2),
        "final_logit_softcapping": args.get("logit_softcap"),
    }


SCALES = ConfigPart(_read_scales, _write_scales)
"""Factors of embeddings and attention scores, and the softcap of the logits."""

ATTENTION_SOFTCAP = ConfigPart(
    lambda config: {"attention_softcap": _softcap(config, "attn_logit_softcapping")},
    lambda args: {"attn_logit_softcapping": args.get("attention_softcap")},
)
_PLAIN_KEYS = required(hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)


def _read_pattern(config: ConfigReader) -> dict[str, Any]:
    every = config.size("sliding_window_pattern", default=6)
    layers = config.size("num_hidden_layers")
    return layer_windows(config, [layer % every != 0 for layer in range(1, layers + 1)])


WINDOW_PATTERN = ConfigPart(_read_pattern, ALTERNATING_WINDOWS.write)
"""Layers have sliding windows by `layer_types`; by default all but every `sliding_window_pattern`-th."""

_NO_ATTENTION_SOFTCAP = required(attn_logit_softcapping=None)
_AROUND_MLP = replace(
    MLP_NORM,
    sources={name.replace("post_attention", "pre_feedforward"): shape for name, shape in MLP_NORM.sources.items()},
)
_MLP_ENTRIES = (_AROUND_MLP, *MLP, MLP_POST_NORM)
_FREE = ("window_size", "window_attn_skip_freq", "logit_softcap", "softmax_scale")


def _fixed(*free: str, **changed: Any) -> dict[str, Any]:
    return but(
        DENSE,
        *(*_FREE, *free),
        layernorm_zero_centered_gamma=True,
        norm_placement="around",
        gelu_tanh=True,
        use_mup=True,
        mup_output_mult=1.0,
        mup_base_hidden_size=None,
        embedding_scale_in_params_dtype=True,
        **changed,
    )


_ABSENT = {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "tie_word_embeddings": True}

GEMMA2 = Family(
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    parts=(SIZES, FFN, PLAIN_ROPE, ALTERNATING_WINDOWS, SCALES, ATTENTION_SOFTCAP, _PLAIN_KEYS),
    table=decoder((*ATTENTION, ATTENTION_POST_NORM), _MLP_ENTRIES),
    fixed=_fixed("attention_softcap"),
    absent=_ABSENT | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
GEMMA3 = Family(
    architectures=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    parts=(
        SIZES,
        FFN,
        LINEAR_AND_LOCAL_ROPE,
        WINDOW_PATTERN,
        SCALES,
        _PLAIN_KEYS,
        required(attn_logit_softcapping=None),
    ),
    table=decoder((QKV_WEIGHT, *HEAD_NORMS, ATTENTION_OUT, ATTENTION_POST_NORM), _MLP_ENTRIES),
    fixed=_fixed("local_rotary_base", "rotary_seq_len_interpolation_factor", qk_layernorm=True),
    absent=_ABSENT,
)
