"""Cohere 2: attention and MLP have the same input, norms subtract the mean, rope only in layers with a sliding window,
and a factor on the logits.

Source: transformers, models/cohere2.
"""

from typing import Any

from mkd.checkpoint.hf.config_json.parts import FFN, SILU, SIZES, Arguments, ConfigPart, required
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import INTERLEAVED_ROPE
from mkd.checkpoint.hf.config_json.windows import ALTERNATING_WINDOWS, layer_windows
from mkd.checkpoint.hf.families.family import ATTENTION, DENSE, Family, but
from mkd.checkpoint.hf.latent import LATENT_INPUT_NORM
from mkd.checkpoint.hf.tables import MLP, decoder


def _read_sizes(config: ConfigReader) -> dict[str, Any]:
    epsilon = float(config.get("layer_norm_eps", (int, float), 1e-5))
    args = SIZES.read(ConfigReader({**config.config, "rms_norm_eps": epsilon}))
    return {**args, "softmax_scale": args["kv_channels"] ** -0.5}


def _write_sizes(args: Arguments) -> dict[str, Any]:
    written = SIZES.write(args)
    return {"layer_norm_eps": written.pop("rms_norm_eps"), **written}


def _read_windows(config: ConfigReader) -> dict[str, Any]:
    layers, every = config.size("num_hidden_layers"), config.size("sliding_window_pattern", default=4)
    windows = layer_windows(config, [layer % every != 0 for layer in range(1, layers + 1)])
    have_window = windows["window_attn_skip_freq"]
    if have_window is None and "full_attention" not in config.get("layer_types", list, []):
        rule = "a size is needed: without one, transformers has no rope in any layer"
        raise config.fail("sliding_window", config.config.get("sliding_window"), rule)
    without = [1 - windowed for windowed in have_window or [0] * layers]
    return {**windows, "no_rope_freq": without if any(without) else None}


def _read_scale(config: ConfigReader) -> dict[str, Any]:
    scale = float(config.get("logit_scale", (int, float)))
    if not scale > 0:
        raise config.fail("logit_scale", scale, "it must be above 0")
    return {"mup_output_mult": scale, "mup_embedding_mult": 1.0}


COHERE2 = Family(
    architectures=("Cohere2ForCausalLM",),
    model_type="cohere2",
    parts=(
        ConfigPart(_read_sizes, _write_sizes),
        FFN,
        INTERLEAVED_ROPE,
        ConfigPart(_read_windows, ALTERNATING_WINDOWS.write),
        ConfigPart(_read_scale, lambda args: {"logit_scale": args["mup_output_mult"]}),
        SILU,
        required(attention_bias=False),
    ),
    table=decoder(ATTENTION, MLP, LATENT_INPUT_NORM),
    fixed=but(
        DENSE,
        *("window_size", "window_attn_skip_freq", "no_rope_freq", "softmax_scale"),
        normalization="LayerNorm",
        parallel_block=True,
        rotary_interleaved=True,
        use_mup=True,
        mup_base_hidden_size=None,
    ),
    absent={"sliding_window": 4096, "tie_word_embeddings": True, "logit_scale": 0.0625},
)
