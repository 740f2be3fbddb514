"""Vision-language folders (`...ForConditionalGeneration`): the text model in them.

Such a model is a vision tower, a projector and the text model of a family, which `text_config` of config.json describes
and whose tensors have a prefix. mkd trains and runs the text model; the other tensors are carried over to exports.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mkd.errors import MkdCheckpointError

TEXT = "text_config"
_TIE = "tie_word_embeddings"
_ROPES = ("rope_scaling", "rope_parameters")
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
"""Prefixes that stand for `model.` in transformers' modules and in files."""
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_CARRIED = tuple(
    f"{model}{part}"
    for part in ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "image_newline")
    for model in ("", "model.")
)
"""Prefixes of the tensors of vision towers and projectors, and the embedding of line breaks in an image."""


@dataclass(frozen=True)
class VisionLanguage:
    """An architecture with a text model inside, by the defaults of its configuration class in transformers."""

    architecture: str
    model_type: str
    text_type: str
    """`model_type` of `text_config`; the default if `family_type` is None."""
    family_type: str | None = None
    """`model_type` of the family that computes the text model; None: that in `text_config`."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that `text_config` lacks, where those of the family differ."""
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Keys that transformers does not read in `text_config`, with the values that it computes with."""
    is_tied: bool = False
    """Default of `tie_word_embeddings`, which is read outside of `text_config`."""
    has_inner_tie: bool = False
    """True if `tie_word_embeddings` inside `text_config` ties the embeddings, too."""
    may_be_flat: bool = False
    """True if the keys of `text_config` may be at the top level."""
    has_mrope: bool = False
    """True if the rope type may be `mrope`: three positions per token, which are equal in text."""
    module_prefix: str = "model.language_model."
    """Stands for `model.` in the names of transformers' modules."""
    inner_model: str | None = None
    """Name of the module of transformers that is a causal language model by itself, as the text model in a folder of
    its own would be: `tie_word_embeddings` is read in `text_config`. None if the whole model alone has an LM head."""
    has_joined_experts: bool = False
    """True if a layer's experts are two tensors, whose last two axes depend on the version that wrote them."""

    def text_config(self, config: Mapping[str, Any], has_own_head: bool) -> dict[str, Any]:
        """config.json of the text model alone.

        Args:
            config: config.json of the whole model.
            has_own_head: the weights have an LM head; without `tie_word_embeddings` it is not tied then.

        Raises:
            MkdCheckpointError: naming a key that is missing, of another type or not supported.
        """
        text = self._text_keys(config)
        kind = text.pop("model_type", None)
        if self.family_type is not None and kind not in (None, self.text_type, self.model_type):
            raise MkdCheckpointError(
                f'config.json: "{TEXT}.model_type" is {kind!r}; {self.architecture} has {self.text_type!r}'
            )
        text.pop("architectures", None)
        if self.has_mrope:
            text |= {key: _without_mrope(text[key]) for key in _ROPES if isinstance(text.get(key), dict)}
        inner = text.pop(_TIE, None)
        tied = config.get(_TIE, self.is_tied and not has_own_head)
        if self.inner_model is not None or (self.has_inner_tie and not tied):
            tied = inner
        family_type = self.family_type or kind or self.text_type
        if family_type == "mistral":
            _check_windows(text)
        # transformers reads null as false
        return {**self.absent, **text, **self.ignored, _TIE: False if tied is None else tied, "model_type": family_type}

    def _text_keys(self, config: Mapping[str, Any]) -> dict[str, Any]:
        text = config.get(TEXT)
        if text is None and self.may_be_flat:
            return {key: value for key, value in config.items() if key not in ("model_type", "vision_config", TEXT)}
        if text is None:
            raise MkdCheckpointError(f'config.json has no "{TEXT}" ({self.architecture})')
        if not isinstance(text, dict):
            value = repr(str(text)[:40])
            raise MkdCheckpointError(f'config.json: "{TEXT}" is {value}; an object is needed ({self.architecture})')
        return dict(text)

    def module_name(self, name: str) -> str:
        """Name in transformers' whole model of a module of the text model."""
        if self.inner_model is not None:
            return f"{self.inner_model}.{name}"
        return self.module_prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def language_model(self, whole: nn.Module) -> nn.Module:
        """The part of transformers' whole model that computes logits of text."""
        return whole if self.inner_model is None else whole.get_submodule(self.inner_model)

    def with_text(self, config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the whole model with changed keys of the text model."""
        if config.get(TEXT) is None:
            return {**config, **changes}
        return {**config, TEXT: {**config[TEXT], **changes}}


def _check_windows(text: Mapping[str, Any]) -> None:
    """Refuse windows by layer, which transformers has for a Mistral alone, where it reads one as a Ministral."""
    kinds, window = text.get("layer_types"), text.get("sliding_window", "the default")
    if isinstance(kinds, list) and window is not None and kinds != ["sliding_attention"] * len(kinds):
        raise MkdCheckpointError(
            f'config.json: "{TEXT}.layer_types" is {str(kinds)[:200]}; in a vision-language model, a "model_type" of '
            '"mistral" has the window in all layers: remove layer_types, or write "ministral"'
        )


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope.get("rope_type", rope.get("type")) != "mrope":
        return dict(rope)
    return {**{key: value for key, value in rope.items() if key != "type"}, "rope_type": "default"}


_QWEN2: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}
_QWEN3_VL_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
_QWEN3_5_SHARED = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_QWEN3_5 = {
    **_QWEN3_5_SHARED,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_QWEN3_5_MOE = {
    **_QWEN3_5_SHARED,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
}
_LLAMA4 = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_GLM4V: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "head_dim": None,
    "partial_rotary_factor": 1.0,
}
_GLM4V_BIAS = {"attention_bias": True}
_GLM4V_MOE: dict[str, Any] = {
    "vocab_size": 151424,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
VISION_LANGUAGE = (
    VisionLanguage(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen2",
        _QWEN2,
        has_inner_tie=True,
        may_be_flat=True,
        has_mrope=True,
    ),
    VisionLanguage(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2",
        _QWEN2,
        has_inner_tie=True,
        may_be_flat=True,
        has_mrope=True,
    ),
    VisionLanguage("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", "qwen3", _QWEN3),
    VisionLanguage("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text", "qwen3_5_text", _QWEN3_5),
    VisionLanguage(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_text", _QWEN3_5_MOE
    ),
    VisionLanguage(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_moe_text",
        _QWEN3_VL_MOE,
        has_joined_experts=True,
    ),
    VisionLanguage("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", "gemma3_text", _GEMMA3, is_tied=True),
    VisionLanguage("Mistral3ForConditionalGeneration", "mistral3", "mistral", is_tied=True),
    VisionLanguage("LlavaForConditionalGeneration", "llava", "llama", has_inner_tie=True),
    VisionLanguage(
        "Llama4ForConditionalGeneration",
        "llama4",
        "llama4_text",
        "llama4_text",
        _LLAMA4,
        inner_model="language_model",
    ),
    VisionLanguage(
        "Glm4vForConditionalGeneration", "glm4v", "glm4v_text", "glm4", _GLM4V, _GLM4V_BIAS, has_inner_tie=True
    ),
    VisionLanguage("Glm46VForConditionalGeneration", "glm46v", "glm4v_text", "glm4", _GLM4V, _GLM4V_BIAS),
    VisionLanguage(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        "glm4v_moe_text",
        "glm4_moe",
        _GLM4V_MOE,
        {"use_qk_norm": False},
        has_inner_tie=True,
    ),
    VisionLanguage("LlavaNextForConditionalGeneration", "llava_next", "llama"),
    VisionLanguage("LlavaOnevisionForConditionalGeneration", "llava_onevision", "qwen2", has_inner_tie=True),
    VisionLanguage("Idefics3ForConditionalGeneration", "idefics3", "llama", module_prefix="model.text_model."),
    VisionLanguage("SmolVLMForConditionalGeneration", "smolvlm", "llama", module_prefix="model.text_model."),
    VisionLanguage("InternVLForConditionalGeneration", "internvl", "qwen2", is_tied=True),
)


def vision_language_of(config: Mapping[str, Any]) -> VisionLanguage | None:
    """The architecture of a config.json, by `architectures` or, without them, by `model_type`; None for other ones.

    Raises:
        MkdCheckpointError: the two contradict each other.
    """
    names, model_type = config.get("architectures"), config.get("model_type")
    if not names:
        return next((known for known in VISION_LANGUAGE if known.model_type == model_type), None)
    names = names if isinstance(names, list) else [names]
    found = next((known for name in names for known in VISION_LANGUAGE if known.architecture == name), None)
    if found is not None and model_type not in (None, found.model_type):
        raise MkdCheckpointError(
            f'config.json: "model_type" is {model_type!r}, "architectures" has {found.architecture}, whose model type '
            f"is {found.model_type!r}; transformers loads by model_type: correct the wrong one of the two"
        )
    return found


@dataclass(frozen=True)
class TextNames:
    """Names of the text model's tensors in a folder."""

    prefix: str = "model."
    """Stands for `model.`."""
    head: str = "lm_head.weight"

    @classmethod
    def find(cls, names: Iterable[str]) -> "TextNames":
        """The names in a folder with tensors of these names."""
        names = set(names)
        prefix = next((prefix for prefix in _TEXT_PREFIXES if f"{prefix}embed_tokens.weight" in names), cls.prefix)
        return cls(prefix, next((head for head in _HEADS if head in names), cls.head))

    def stored(self, name: str) -> str:
        """Name in the folder of a tensor of the text model."""
        if name == "lm_head.weight":
            return self.head
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def text(self, stored: str) -> str | None:
        """Name in the text model of a tensor of the folder; None for one that is carried over."""
        if stored.startswith(_CARRIED):
            return None
        if stored == self.head:
            return "lm_head.weight"
        return f"model.{stored.removeprefix(self.prefix)}" if stored.startswith(self.prefix) else stored


_JOINED, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def transposed_experts(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Names of the tensors of experts that are stored as [experts, in, out], as by transformers 4 and on the hub;
    transformers 5 writes [experts, out, in], and reads both by their shapes.

    Args:
        shapes: of the text model's tensors. Gate and up are joined, so that the two tensors of a layer have one
            reading only.

    Raises:
        MkdCheckpointError: a tensor [experts, in, out] is square, which transformers 5 reads as [experts, out, in].
    """
    found = set()
    for name in shapes:
        joined, down = shapes[name], shapes.get(other := name.replace(_JOINED, _DOWN), ())
        if not name.endswith(_JOINED) or len(joined) != 3 or len(down) != 3:
            continue
        if joined[1] == down[2] and joined[2] == 2 * down[1]:
            found |= {name, other}
            for square in (name, other):
                if shapes[square][1] == shapes[square][2]:
                    raise MkdCheckpointError(
                        f"tensor {square} of shape {list(shapes[square])} is [experts, in, out] by the other tensor of "
                        "its layer, but transformers 5 reads a square one as [experts, out, in]: exchange the last two "
                        "axes of both tensors in all layers"
                    )
    return frozenset(found)


def text_module_name(name: str) -> str:
    """Name in the text model of a module of transformers' whole model; older versions have no `language_model`."""
    for prefix in _TEXT_PREFIXES[:-1]:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name
