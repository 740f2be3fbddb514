"""Mamba 2 layers, and layers with one mixer each: kinds of layers in config.json, sizes, tensors.

Sources: transformers, models/nemotron_h.
"""

from typing import Any

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.layouts import columns, row_blocks, rows
from mkd.checkpoint.hf.tables import Entry, Where
from mkd.models.layer_options import ATTENTION, MAMBA, MIXTURE, MLP_ONLY

_MIXERS = {"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": MLP_ONLY, "moe": MIXTURE}
"""Name in `layers_block_type` -> mixer, which is also the letter in `hybrid_override_pattern`."""
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_KINDS, _PATTERN = "layers_block_type", "hybrid_override_pattern"
_MOST_LAYERS = 10_000


def read_mixers(config: ConfigReader) -> list[str]:
    """The mixer of each layer, from the list or from the pattern of letters. Raises naming the key.

    `num_hidden_layers`, which transformers ignores, must agree if it is there, and so must other spellings.
    """
    kinds, pattern = config.get(_KINDS, list, []), config.get(_PATTERN, str, "")
    if len(kinds) > _MOST_LAYERS or len(pattern) > _MOST_LAYERS:
        key = _KINDS if len(kinds) > _MOST_LAYERS else _PATTERN
        raise config.fail(key, "long", f"at most {_MOST_LAYERS} layers are supported")
    found = [_OLD_NAMES.get(kind, kind) if isinstance(kind, str) else None for kind in kinds]
    if not set(_MIXERS).issuperset(found):
        raise config.fail(_KINDS, kinds, f"its entries are {', '.join(map(repr, (*_OLD_NAMES, *_MIXERS)))}")
    mixers = [_MIXERS[kind] for kind in found]
    if not set(_MIXERS.values()).issuperset(pattern):
        raise config.fail(_PATTERN, pattern, f"its letters are {' '.join(_MIXERS.values())}")
    if mixers and pattern and mixers != list(pattern):
        raise config.fail(_PATTERN, pattern, f'"{_KINDS}" is {kinds!r}; remove the wrong one of the two')
    mixers = mixers or list(pattern)
    if not mixers:
        raise config.fail(_KINDS, config.config.get(_KINDS), f'it or "{_PATTERN}" must name the mixer of each layer')
    if config.get("num_hidden_layers", int, len(mixers)) != len(mixers):
        rule = f'"{_KINDS}" or "{_PATTERN}" has {len(mixers)} layers; remove the wrong one of the two'
        raise config.fail("num_hidden_layers", config.config["num_hidden_layers"], rule)
    if (other := config.config.get("layer_types")) is not None:
        raise config.fail("layer_types", other, f'write the kinds of the layers as "{_KINDS}"')
    return mixers


def write_mixers(args: Arguments) -> dict[str, Any]:
    """The keys that `read_mixers` reads."""
    names = {letter: name for name, letter in _MIXERS.items()}
    return {_KINDS: [names[mixer] for mixer in args["layer_mixers"]]}


_SIZES = {
    "mamba_state_dim": ("ssm_state_size", None, 128),
    "mamba_head_dim": ("mamba_head_dim", None, 64),
    "mamba_num_heads": ("mamba_num_heads", None, 128),
    "mamba_num_groups": ("n_groups", "mamba_n_groups", 8),
    "linear_conv_kernel_dim": ("conv_kernel", "mamba_d_conv", 4),
}
"""Megatron's argument -> key of config.json, its older name, and the default of transformers."""
_LEAST_STEP = "time_step_min"
_NO_LIMIT = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


def _read_mamba(config: ConfigReader) -> dict[str, Any]:
    found = {}
    for argument, (key, old, default) in _SIZES.items():
        found[argument] = config.size(config.only_key(key, old) if old else key, default=default)
    heads, groups = found["mamba_num_heads"], found["mamba_num_groups"]
    if heads % groups:
        raise config.fail("n_groups", groups, f"it must divide mamba_num_heads {heads}")
    for key in ("time_step_limit", "mamba_dt_limit"):  # transformers ignores it in this family
        limit = config.config.get(key)
        if limit not in _NO_LIMIT:
            raise config.fail(key, limit, "only [0.0, Infinity] is supported: write the lower limit as time_step_min")
    key = config.only_key(_LEAST_STEP, "mamba_dt_min")
    least = float(config.get(key, (int, float), 1e-3))
    if least < 0:
        raise config.fail(key, least, "it must be at least 0")
    return found | {"least_time_step": least}


MAMBA_SIZES = ConfigPart(
    _read_mamba,
    lambda args: {
        **{key: args[argument] for argument, (key, _, _) in _SIZES.items()},
        _LEAST_STEP: args["least_time_step"],
    },
)
"""Sizes of Mamba 2 layers, and the lower limit of their time step. `chunk_size` changes no result."""


def mamba_dims(args: Arguments) -> dict[str, int]:
    """Sizes of `Dims` that only Mamba layers have."""
    return {
        "mamba_heads": args["mamba_num_heads"],
        "mamba_inner": args["mamba_num_heads"] * args["mamba_head_dim"],
        "mamba_states": args["mamba_num_groups"] * args["mamba_state_dim"],
        "taps": args["linear_conv_kernel_dim"],
    }


def has_mixer(*mixers: str) -> Where:
    """True for the layers with one of the mixers."""
    return lambda args, layer: args["layer_mixers"][layer] in mixers


_MG = "decoder.layers.{layer}."
_OWN = _MG + "self_attention."
_SECTIONS = {"z": "mamba_inner", "x": "mamba_inner", "B": "mamba_states", "C": "mamba_states", "dt": "mamba_heads"}
"""Block of rows of the input projection, also in checkpoints -> its rows."""
_CONVOLVED = {name: _SECTIONS[name] for name in ("x", "B", "C")}


def _per_head(name: str, source: str) -> Entry:
    return Entry(_OWN + name, {f"{source}{name}": ("mamba_heads",)}, rows("mamba_heads"))


def mamba_entries(source: str) -> tuple[Entry, ...]:
    """Entries of a Mamba 2 mixer.

    Args:
        source: beginning of the names of its tensors, such as `backbone.layers.{layer}.mixer.`.
    """
    joined = row_blocks(tuple(_CONVOLVED.values()))
    return (
        Entry(
            _OWN + "in_proj.weight",
            {source + "in_proj.weight": ("mamba_projected", "hidden")},
            row_blocks(tuple(_SECTIONS.values())),
            sections=_SECTIONS,
        ),
        Entry(
            _OWN + "conv1d.weight",
            {source + "conv1d.weight": ("mamba_convolved", "one", "taps")},
            joined,
            sections=_CONVOLVED,
        ),
        Entry(_OWN + "conv1d.bias", {source + "conv1d.bias": ("mamba_convolved",)}, joined, sections=_CONVOLVED),
        *(_per_head(name, source) for name in ("dt_bias", "A_log", "D")),
        Entry(_OWN + "norm.weight", {source + "norm.weight": ("mamba_inner",)}, rows("mamba_inner")),
        Entry(
            _OWN + "out_proj.weight", {source + "out_proj.weight": ("hidden", "mamba_inner")}, columns("mamba_inner")
        ),
    )
