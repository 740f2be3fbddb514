"""Model families: config.json <-> Megatron arguments, and Hugging Face tensors <-> Megatron parameters.

A family is one `Family` object. Loading, import, export, checks and pruning are derived from it. To add a family (QWEN3
takes 7 lines):

1. `parts`: the parts of config.json (`config_json/`) that translate its keys to Megatron arguments and back. If no
   existing part covers a key, write a `ConfigPart`: a function that reads the keys, and one that writes them.
2. `table`: the tensors (`tables.py`), one `Entry` per Megatron parameter; `decoder(attention, mlp)` assembles a model.
3. `fixed`: the Megatron arguments with one value in the whole family; start from `DENSE` or `MIXTURE`
   (`family.py`). An argument that a part reads must not be in it.
4. `absent`: values that transformers uses for keys missing in config.json, where the parts would use another one.
5. Add the family to `dense.py`, `mixtures.py` or a file of its own and to `FAMILIES`, a small model to `NEAR_MODELS`
   (tests/support/hf_models.py) and a configuration to `BASES` (tests/unit/checkpoint/hf/test_config_sweep.py): the
   tests compare spellings, logits, losses and gradients with transformers, and the round trip bit for bit.

Keys that Megatron cannot compute are refused by `required(...)` and by the parts, with the name of the key.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from mkd.checkpoint.hf.families.cohere import COHERE2
from mkd.checkpoint.hf.families.dense import (
    ARCEE,
    CWM,
    ERNIE,
    GLM,
    HELIUM,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
    YOUTU,
)
from mkd.checkpoint.hf.families.family import Family
from mkd.checkpoint.hf.families.gemma import GEMMA2, GEMMA3
from mkd.checkpoint.hf.families.glm import GLM4
from mkd.checkpoint.hf.families.granite import GRANITE, GRANITE4
from mkd.checkpoint.hf.families.llama4 import LLAMA4
from mkd.checkpoint.hf.families.ministral3 import MINISTRAL3
from mkd.checkpoint.hf.families.mixtures import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_VL_MOE_TEXT,
    SOLAR_OPEN,
)
from mkd.checkpoint.hf.families.nemotron_h import NEMOTRON_H
from mkd.checkpoint.hf.families.olmo import OLMO2, OLMO3, OLMOE
from mkd.checkpoint.hf.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mkd.checkpoint.hf.families.vision_language import VISION_LANGUAGE
from mkd.errors import MkdCheckpointError

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GPT_OSS),
    *(OLMO2, OLMO3, GEMMA2, GEMMA3, GLM4),
    *(MINISTRAL, MINISTRAL3, CWM, SMOLLM3, SEED_OSS, ERNIE, HELIUM, GLM, ARCEE, YOUTU, GRANITE, GRANITE4),
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
    *(OLMOE, LLAMA4, COHERE2, NEMOTRON_H),
    *(QWEN2_MOE, DEEPSEEK_V2, GLM4_MOE, DOTS1, SOLAR_OPEN, GLM4_MOE_LITE),
)

INNER_FAMILIES = (QWEN3_VL_MOE_TEXT,)
"""Text models that have no architecture of their own: a part of a vision-language folder only."""

_WITHOUT_SCALE = "transformers computes its logits without text_config.logit_scale, which its text model has"
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"), _WITHOUT_SCALE),
    **{
        known.architecture: "a vision-language model: its folder can be read, its text model alone is of another name"
        for known in VISION_LANGUAGE
    },
}
"""Architectures that are not a family of text models -> reason."""


def family_by_name(name: str) -> Family:
    """The family of an architecture. Raises `MkdCheckpointError` with the list of known architectures."""
    return family_of({"architectures": [name]})


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by `architectures` or, without them, by `model_type`.

    Raises:
        MkdCheckpointError: with the list of known architectures, or naming two keys that contradict each other.
    """
    known = {name: family for family in FAMILIES for name in family.architectures}
    names, model_type = config.get("architectures"), config.get("model_type")
    if not names:
        if (inner := next((family for family in INNER_FAMILIES if family.model_type == model_type), None)) is not None:
            return inner
        names = [family.architectures[0] for family in FAMILIES if family.model_type == model_type]
    names = [str(name) for name in (names if isinstance(names, list) else [names])]
    for name in names:
        if name in known and config.get("architectures") != name:
            if model_type not in (None, known[name].model_type):
                raise MkdCheckpointError(
                    f'config.json: "model_type" is {model_type!r}, "architectures" has {name}, whose model type is '
                    f"{known[name].model_type!r}; transformers loads by model_type: correct the wrong one of the two"
                )
            return known[name]
    reasons = "".join(f" ({UNSUPPORTED[name]})" for name in names if name in UNSUPPORTED)
    whole = [known_whole.architecture for known_whole in VISION_LANGUAGE]
    if names or model_type is None:
        key, value = "architectures", config.get("architectures")
        near = [get_close_matches(name, [*known, *whole], n=1, cutoff=0.0) for name in names]
        nearest = near[0][0] if near and near[0] else ""
    else:
        by_type = {family.model_type: name for name, family in known.items()}
        near = get_close_matches(str(model_type), by_type, n=1, cutoff=0.0)
        key, value, nearest = "model_type", model_type, by_type[near[0]] if near else ""
    raise MkdCheckpointError(
        f'config.json: "{key}" is {value!r}{reasons}; known architectures: '
        + ", ".join(sorted([*known, *whole]))
        + (f" (the nearest by name is {nearest})" if nearest else "")
    )
