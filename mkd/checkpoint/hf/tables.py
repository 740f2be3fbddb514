"""Tensor tables: the Hugging Face tensors of each Megatron parameter, one `Entry` per parameter, shared by families.

An `Entry` is a pattern with `{layer}` and `{expert}`; `Family.tensors` expands it to one `Item` per parameter of a
model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mkd.checkpoint.hf.layouts import (
    ATTENTION_OUTPUT,
    DOWN,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_UP,
    PACKED_GATE_UP,
    PACKED_QKV,
    QKV,
    REPLICATED,
    SHARED_DOWN,
    SHARED_GATE_UP,
    VOCAB,
    Layout,
    rows,
)

_LAYER, _EXPERT = "{layer}.", "{expert}."

Axes = tuple[tuple[str, int], ...]
"""Leading axes of a tensor in a checkpoint: (Megatron argument with the size of the axis, index into it)."""

Where = Callable[[Mapping[str, Any], int | None], bool]
"""(Megatron arguments, layer) -> True if the layer has the parameter."""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it consists of.

    `{layer}` and `{expert}` are indices in the whole model. `sources` maps each Hugging Face tensor to its shape, in
    names of `Dims`. `aliases` are names of the same parameter under other layer specs: Transformer Engine stores a
    norm's weight in the linear layer that follows it.
    """

    megatron: str
    sources: Mapping[str, tuple[str, ...]]
    layout: Layout
    aliases: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    """Names in a checkpoint if they differ from the parameter's names; an import writes all of them."""
    where: Where = lambda args, layer: True
    in_fp32: bool = False
    """True if the parameter is stored in fp32 for every dtype of the weights."""
    shape: tuple[str, ...] = ()
    """Shape of the unsharded parameter, if it is not that of the concatenated rows of the Hugging Face tensors."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Blocks of rows that a checkpoint stores as separate tensors: end of the tensor's name -> number of rows, as a
    name of `Dims`. Empty for a parameter that is stored whole."""

    @property
    def has_all_experts(self) -> bool:
        """True if one Hugging Face tensor holds all experts along its first axis, while the parameter is one expert."""
        return _EXPERT in self.megatron and not any(_EXPERT in name for name in self.sources)

    @property
    def in_checkpoint(self) -> tuple[str, ...]:
        """Possible names in a checkpoint; both layer specs save under the last alias."""
        return self.stored or (*reversed(self.aliases), self.megatron)


@dataclass(frozen=True)
class Item:
    """An entry for one layer and one expert: a parameter of the model."""

    entry: Entry
    layer: int | None
    expert: int | None
    shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face tensor -> shape."""
    stacked: bool = True
    """True if megatron stores the layers as one tensor, which requires that all layers are equal."""
    shape: tuple[int, ...] = ()
    """See `Entry.shape`."""
    sections: Mapping[str, int] = field(default_factory=dict)
    """See `Entry.sections`."""

    @property
    def parameters(self) -> list[str]:
        """The parameter's name under each layer spec, with indices in the whole model."""
        return [self._fill(name) for name in (self.entry.megatron, *self.entry.aliases)]

    @property
    def name(self) -> str:
        """The parameter's name, for messages."""
        return self._fill(self.entry.megatron)

    def stored_keys(self) -> Iterator[tuple[str, Axes]]:
        """Possible keys of the parameter in a checkpoint; layers and experts may be stacked or separate."""
        for name in self.entry.in_checkpoint:
            for separate in ((), (_EXPERT,), (_LAYER,), (_LAYER, _EXPERT)):
                if all(mark in name for mark in separate):
                    yield self._key(name, separate)

    def saved_keys(self) -> list[tuple[str, Axes]]:
        """Keys that an import writes; stacked in the same cases as by megatron."""
        names = self.entry.stored or self.entry.in_checkpoint[:1]
        return [self._key(name, () if self.stacked else (_LAYER,)) for name in names]

    def stored_tensors(self, key: str) -> list[str]:
        """Names of the tensors that a checkpoint stores for a key, in the order of the parameter's rows."""
        return [f"{key}.{section}" for section in self.sections] or [key]

    def _key(self, name: str, separate: tuple[str, ...]) -> tuple[str, Axes]:
        marks = ((_LAYER, "num_layers", self.layer), (_EXPERT, "num_experts", self.expert))
        stacked = [entry for entry in marks if entry[0] in name and entry[0] not in separate]
        for mark, _, _ in stacked:
            name = name.replace(mark, "")
        return self._fill(name), tuple((argument, number) for _, argument, number in stacked)

    def _fill(self, name: str) -> str:
        return name.format(layer=self.layer, expert=self.expert)


_MG, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = Entry("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, VOCAB)
FINAL_NORM = Entry("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, REPLICATED)
HEAD = Entry("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, VOCAB)

INPUT_NORM = Entry(
    _MG + "input_layernorm.weight",
    {_HF + "input_layernorm.weight": ("hidden",)},
    REPLICATED,
    aliases=(_MG + "self_attention.linear_qkv.layer_norm_weight",),
)
MLP_NORM = Entry(
    _MG + "pre_mlp_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": ("hidden",)},
    REPLICATED,
    aliases=(_MG + "mlp.linear_fc1.layer_norm_weight",),
)
# megatron-core 0.19 saves this norm under the first name from Transformer Engine's layers and under the second from its
# local layers. An import writes both names, so that either can load it.
MOE_NORM = Entry(
    _MG + "pre_mlp_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": ("hidden",)},
    REPLICATED,
    stored=(_MG + "pre_mlp_layernorm.weight", _MG + "mlp.linear_fc1.layer_norm_weight"),
)

_PROJECTIONS = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "key"))
QKV_WEIGHT = Entry(
    _MG + "self_attention.linear_qkv.weight",
    {f"{_HF}self_attn.{name}.weight": (size, "hidden") for name, size in _PROJECTIONS},
    QKV,
)
QKV_BIAS = Entry(
    _MG + "self_attention.linear_qkv.bias",
    {f"{_HF}self_attn.{name}.bias": (size,) for name, size in _PROJECTIONS},
    QKV,
)
OPTIONAL_QKV_BIAS = replace(QKV_BIAS, where=lambda args, layer: args["add_qkv_bias"] or args["add_bias_linear"])
PACKED_QKV_WEIGHT = Entry(
    _MG + "self_attention.linear_qkv.weight",
    {_HF + "self_attn.qkv_proj.weight": ("query_key_value", "hidden")},
    PACKED_QKV,
)
HEAD_NORMS = tuple(
    Entry(
        f"{_MG}self_attention.{name}_layernorm.weight",
        {f"{_HF}self_attn.{name}_norm.weight": ("head_dim",)},
        REPLICATED,
    )
    for name in ("q", "k")
)
OPTIONAL_HEAD_NORM_ENTRIES = tuple(
    replace(entry, where=lambda args, layer: args["qk_layernorm"]) for entry in HEAD_NORMS
)
ATTENTION_OUT = Entry(
    _MG + "self_attention.linear_proj.weight",
    {_HF + "self_attn.o_proj.weight": ("hidden", "query")},
    ATTENTION_OUTPUT,
)


def _has_biases(args: Mapping[str, Any], layer: int | None) -> bool:
    return args["add_bias_linear"]


OPTIONAL_ATTENTION_OUT_BIAS = Entry(
    _MG + "self_attention.linear_proj.bias",
    {_HF + "self_attn.o_proj.bias": ("hidden",)},
    REPLICATED,
    where=lambda args, layer: args["add_bias_linear"] or bool(args.get("attention_output_bias")),
)

MLP = (
    Entry(
        _MG + "mlp.linear_fc1.weight",
        {_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        GATE_UP,
    ),
    Entry(_MG + "mlp.linear_fc2.weight", {_HF + "mlp.down_proj.weight": ("hidden", "ffn")}, DOWN),
)
OPTIONAL_MLP_BIAS = (
    Entry(
        _MG + "mlp.linear_fc1.bias",
        {_HF + "mlp.gate_proj.bias": ("ffn",), _HF + "mlp.up_proj.bias": ("ffn",)},
        GATE_UP,
        where=_has_biases,
    ),
    Entry(_MG + "mlp.linear_fc2.bias", {_HF + "mlp.down_proj.bias": ("hidden",)}, REPLICATED, where=_has_biases),
)
UNGATED_MLP = (
    Entry(_MG + "mlp.linear_fc1.weight", {_HF + "mlp.up_proj.weight": ("ffn", "hidden")}, rows("ffn")),
    Entry(_MG + "mlp.linear_fc1.bias", {_HF + "mlp.up_proj.bias": ("ffn",)}, rows("ffn"), where=_has_biases),
    MLP[1],
    OPTIONAL_MLP_BIAS[1],
)
"""An MLP without gate, with optional biases."""
PACKED_MLP = (
    Entry(
        _MG + "mlp.linear_fc1.weight",
        {_HF + "mlp.gate_up_proj.weight": ("gate_and_up", "hidden")},
        PACKED_GATE_UP,
    ),
    MLP[1],
)


def mixture(prefix: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Router and experts, where a Hugging Face folder has separate tensors for each expert.

    Args:
        prefix: prefix of the router and the experts inside a layer, such as `mlp.`.
        gate, up, down: names of an expert's three matrices.
    """
    expert = _HF + prefix + "experts.{expert}."
    return (
        Entry(_MG + "mlp.router.weight", {_HF + prefix + "gate.weight": ("experts", "hidden")}, REPLICATED),
        expert_entry(
            "linear_fc1.weight",
            {f"{expert}{name}.weight": ("moe_ffn", "hidden") for name in (gate, up)},
            EXPERT_GATE_UP,
        ),
        expert_entry("linear_fc2.weight", {f"{expert}{down}.weight": ("hidden", "moe_ffn")}, EXPERT_DOWN),
    )


def shared_experts(name: str) -> tuple[Entry, ...]:
    """The MLP of the shared experts, `mlp.<name>` in a Hugging Face folder."""
    source = f"{_HF}mlp.{name}."
    return (
        Entry(
            _MG + "mlp.shared_experts.linear_fc1.weight",
            {f"{source}{part}_proj.weight": ("shared_ffn", "hidden") for part in ("gate", "up")},
            SHARED_GATE_UP,
        ),
        Entry(
            _MG + "mlp.shared_experts.linear_fc2.weight",
            {f"{source}down_proj.weight": ("hidden", "shared_ffn")},
            SHARED_DOWN,
        ),
    )


SHARED_EXPERT_GATE = Entry(
    _MG + "mlp.shared_experts.gate_weight",
    {_HF + "mlp.shared_expert_gate.weight": ("one", "hidden")},
    REPLICATED,
)


def expert_entry(
    name: str, sources: Mapping[str, tuple[str, ...]], layout: Layout, shape: tuple[str, ...] = ()
) -> Entry:
    """A parameter of each expert, such as `linear_fc1.weight`; see `Entry` for the other arguments."""
    experts = f"{_MG}mlp.experts."
    return Entry(
        f"{experts}local_experts.{{expert}}.{name}",
        sources,
        layout,
        aliases=(f"{experts}{name}{{expert}}",),
        stored=(f"{experts}experts.{{expert}}.{name}",),
        shape=shape,
    )


def decoder(attention: tuple[Entry, ...], mlp: tuple[Entry, ...], input_norm: Entry = INPUT_NORM) -> tuple[Entry, ...]:
    """Table of a whole model, from the entries of a layer's attention and of its MLP with its norm."""
    return (EMBEDDING, input_norm, *attention, *mlp, FINAL_NORM, HEAD)
