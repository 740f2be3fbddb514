"""config.json of vision-language models in many spellings: the text model is what transformers builds, or is refused.

Without `-m slow`, every eighth spelling is compared.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from mkd.checkpoint.hf.families.vision_language import VISION_LANGUAGE, VisionLanguage, vision_language_of
from tests.support.config_spellings import (
    ABSENT,
    COMMON,
    EXPERT_SPELLINGS,
    EXPERTS,
    GEMMA,
    GEMMA_SPELLINGS,
    NO_ROPE,
    PLAIN,
    ROUTED,
    SPELLINGS,
    YARN,
)
from tests.support.config_spellings import BASES as TEXT_BASES
from tests.support.vision_language import WHOLE
from tests.unit.checkpoint.hf.test_config_sweep import assert_equal_facts, facts_of_model, mkd_facts, quick_transformers

__all__ = ["quick_transformers"]


def without_tie(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "tie_word_embeddings"}


TEXT = without_tie(COMMON)
QWEN2 = TEXT | {"head_dim": ABSENT, "rope_theta": ABSENT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
GLM4V = TEXT | {"head_dim": ABSENT, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]}}
QWEN2_SECTIONS = {"mrope_section": [1, 1, 1]}
BASES: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen3_vl": TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "qwen3_vl_moe": TEXT
    | EXPERTS
    | {"num_experts": 4, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "gemma3": TEXT | GEMMA | {"rope_local_base_freq": 3e3},
    "mistral3": TEXT | {"model_type": "mistral", "sliding_window": 5},
    "llava": TEXT,
    "qwen3_5": without_tie(TEXT_BASES["qwen3_5_text"]),
    "qwen3_5_moe": without_tie(TEXT_BASES["qwen3_5_moe_text"]),
    "llama4": without_tie(TEXT_BASES["llama4_text"]),
    "glm4v": GLM4V,
    "glm46v": GLM4V | {"model_type": "glm4v_text"},
    "glm4v_moe": TEXT
    | EXPERTS
    | ROUTED
    | {"partial_rotary_factor": 1.0, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "llava_next": TEXT,
    "llava_onevision": TEXT | {"head_dim": ABSENT},
    "idefics3": TEXT,
    "smolvlm": TEXT,
    "internvl": TEXT | {"head_dim": ABSENT},
}
ROPES = {
    "mrope": {"rope_scaling": {"type": "mrope", **QWEN2_SECTIONS}},
    "mrope in rope_parameters": NO_ROPE
    | {"rope_parameters": {"rope_type": "mrope", "rope_theta": 2e4, **QWEN2_SECTIONS}},
    "mrope with theta on top": NO_ROPE | {"rope_theta": 3e4, "rope_scaling": {"type": "mrope", **QWEN2_SECTIONS}},
    "rope_type beside mrope": {"rope_scaling": {"type": "mrope", "rope_type": "default", **QWEN2_SECTIONS}},
    "plain with sections": {"rope_scaling": PLAIN | QWEN2_SECTIONS},
    "yarn with sections": {"rope_scaling": YARN | QWEN2_SECTIONS},
    "no rope": NO_ROPE,
}
TOP_SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"tie {outer}, inside {inner}": ({"tie_word_embeddings": outer}, {"tie_word_embeddings": inner})
    for outer in (True, False, None, ABSENT)
    for inner in (True, False, None, ABSENT)
} | {
    "architectures absent": ({"architectures": ABSENT}, {}),
    "other model_type": ({"model_type": "llama"}, {}),
    "model_type of the text": ({}, {"model_type": "qwen3"}),
    "no model_type of the text": ({}, {"model_type": ABSENT}),
    "qwen2 as text": ({}, {"model_type": "qwen2", "head_dim": ABSENT}),
    "unknown text": ({}, {"model_type": "bloom"}),
    "sizes on top": ({"hidden_size": 12, "num_hidden_layers": 1, "rope_theta": 7.0}, {}),
    "text_config of another type": ({"text_config": "llama"}, {}),
}
"""Name -> changes at the top level, and in `text_config`."""


def named(model_type: str) -> VisionLanguage:
    return next(known for known in VISION_LANGUAGE if known.model_type == model_type)


def without_absent(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not ABSENT}


def spelled(model_type: str, text: dict[str, Any], top: dict[str, Any] | None = None) -> dict[str, Any]:
    known = named(model_type)
    vision = next(sizes for sizes in WHOLE.values() if sizes["model_type"] == model_type)["vision_config"]
    width = {"out_hidden_size": 24} if "out_hidden_size" in vision else {}
    width |= {"hidden_size": 24} if model_type == "qwen2_vl" else {}
    whole = {
        "architectures": [known.architecture],
        "model_type": model_type,
        "text_config": without_absent(BASES[model_type] | text),
        "vision_config": vision | width,
    }
    return without_absent(whole | (top or {}))


def spellings_of(model_type: str) -> dict[str, dict[str, Any]]:
    inside = SPELLINGS | ROPES | (GEMMA_SPELLINGS if model_type == "gemma3" else {})
    inside |= EXPERT_SPELLINGS if model_type in ("qwen3_vl_moe", "llama4", "glm4v_moe") else {}
    of_top = {name: spelled(model_type, text, top) for name, (top, text) in TOP_SPELLINGS.items()}
    return {name: spelled(model_type, text) for name, text in inside.items()} | of_top


class TextModel(nn.Module):
    """The text model in transformers' whole model, with the names of a text model alone."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        decoder = whole.get_decoder()
        self.model = getattr(decoder, "model", decoder)  # in Llama 4 the decoder has an LM head, too
        self.lm_head = whole.get_output_embeddings()
        self._whole = (whole,)

    def forward(self, tokens: torch.Tensor, **options: Any) -> Any:
        return self._whole[0](tokens, **options)


def transformers_facts(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    loaded.dtype = torch.float32
    model = AutoModelForImageTextToText.from_config(loaded, attn_implementation="eager").eval()
    return facts_of_model(loaded.text_config, TextModel(model))


def own_facts(config: dict[str, Any]) -> dict[str, Any]:
    return mkd_facts(vision_language_of(config).text_config(config, has_own_head=False))


def eighths() -> Any:
    for number, known in enumerate(VISION_LANGUAGE):
        yield pytest.param(known.model_type, [number % 8], id=known.model_type)
        others = [rest for rest in range(8) if rest != number % 8]
        yield pytest.param(known.model_type, others, id=f"{known.model_type}-others", marks=pytest.mark.slow)


@pytest.mark.usefixtures("quick_transformers")
@pytest.mark.parametrize(("model_type", "remainders"), list(eighths()))
def test_no_silent_difference(model_type: str, remainders: list[int], tmp_path: Path) -> None:
    spellings = list(spellings_of(model_type).items())
    chosen = {name: config for rest in remainders for name, config in spellings[rest::8]}
    equal = assert_equal_facts(chosen, own_facts, lambda config: transformers_facts(tmp_path, config))
    assert equal >= 7 * len(remainders)


@pytest.mark.usefixtures("quick_transformers")
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_keys_at_the_top_level(model_type: str, tmp_path: Path) -> None:
    """Folders of the hub have no `text_config`."""
    configs = {}
    for name, change in {**ROPES, "as it is": {}, "tied": {"tie_word_embeddings": True}}.items():
        whole = spelled(model_type, change)
        text = whole.pop("text_config")
        configs[name] = whole | text
    equal = assert_equal_facts(configs, own_facts, lambda config: transformers_facts(tmp_path, config))
    assert equal >= 6


def test_defaults_of_transformers() -> None:
    """Every size that a configuration class has a default for."""
    for known in VISION_LANGUAGE:
        theirs = AutoConfig.for_model(known.model_type).text_config
        for key, value in known.absent.items():
            if key not in ("rope_theta", "partial_rotary_factor") and value is not None:
                assert getattr(theirs, key) == value, (known.architecture, key)
