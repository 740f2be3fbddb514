"""Which Hugging Face tensors make up which Megatron parameter: one row an `Entry`, shared by the families."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    VOCAB,
    Layout,
)

_LAYER, _EXPERT = "{layer}.", "{expert}."

Axes = tuple[tuple[str, int], ...]
"""A checkpoint tensor's leading axes: (Megatron argument with the axis' size, index into it)."""


Where = Callable[[Mapping[str, Any], int | None], bool]
"""(Megatron arguments, layer) -> whether the model has the parameter there."""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `{layer}` and `{expert}` stand for indices in the whole model. `sources` gives each Hugging Face tensor's shape by
    the names of `Dims`. `aliases` are the names of the same parameter under other layer specs: Transformer Engine keeps
    a norm's weight in the linear layer that follows it.
    """

    megatron: str
    sources: Mapping[str, tuple[str, ...]]
    layout: Layout
    aliases: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    """Names in a checkpoint where they are not those of the parameter, as tuples are written: all of them."""
    where: Where = lambda args, layer: True
    in_fp32: bool = False
    """Stored in fp32, whatever the dtype of the weights."""
    shape: tuple[str, ...] = ()
    """Of the uncut parameter, where it is not that of the Hugging Face tensors one below the other."""

    @property
    def has_all_experts(self) -> bool:
        """Whether the Hugging Face tensor holds all experts, the parameter one: its first axis counts them."""
        return _EXPERT in self.megatron and not any(_EXPERT in name for name in self.sources)

    @property
    def in_checkpoint(self) -> tuple[str, ...]:
        """Names under which a checkpoint may hold the parameter; both layer specs save under the last alias."""
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
    """Whether megatron stores equal layers as one tensor; it does not if layers differ."""
    shape: tuple[int, ...] = ()
    """See `Entry.shape`."""

    @property
    def parameters(self) -> list[str]:
        """The parameter's name under each layer spec, with indices in the whole model."""
        return [self._fill(name) for name in (self.entry.megatron, *self.entry.aliases)]

    @property
    def name(self) -> str:
        """The parameter's name, for messages."""
        return self._fill(self.entry.megatron)

    def stored_keys(self) -> Iterator[tuple[str, Axes]]:
        """Where a checkpoint may hold the parameter: equal layers, and experts, are stored stacked or apart."""
        for name in self.entry.in_checkpoint:
            for apart in ((), (_EXPERT,), (_LAYER,), (_LAYER, _EXPERT)):
                if all(mark in name for mark in apart):
                    yield self._key(name, apart)

    def saved_keys(self) -> list[tuple[str, Axes]]:
        """Where an import writes it: stacked, as far as megatron does."""
        names = self.entry.stored or self.entry.in_checkpoint[:1]
        return [self._key(name, () if self.stacked else (_LAYER,)) for name in names]

    def _key(self, name: str, apart: tuple[str, ...]) -> tuple[str, Axes]:
        marks = ((_LAYER, "num_layers", self.layer), (_EXPERT, "num_experts", self.expert))
        stacked = [entry for entry in marks if entry[0] in name and entry[0] not in apart]
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
# megatron-core 0.19 saves this norm under the first name from Transformer Engine's layers, under the second from its
# local ones. An import writes both, so that either loads it.
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
ATTENTION_OUT = Entry(
    _MG + "self_attention.linear_proj.weight",
    {_HF + "self_attn.o_proj.weight": ("hidden", "query")},
    ATTENTION_OUTPUT,
)

MLP = (
    Entry(
        _MG + "mlp.linear_fc1.weight",
        {_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
        GATE_UP,
    ),
    Entry(_MG + "mlp.linear_fc2.weight", {_HF + "mlp.down_proj.weight": ("hidden", "ffn")}, DOWN),
)
PACKED_MLP = (
    Entry(
        _MG + "mlp.linear_fc1.weight",
        {_HF + "mlp.gate_up_proj.weight": ("gate_and_up", "hidden")},
        PACKED_GATE_UP,
    ),
    MLP[1],
)


def mixture(prefix: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """A router and experts; a Hugging Face folder has one tensor an expert.

    Args:
        prefix: of the router and the experts inside a layer, such as `mlp.`.
        gate, up, down: names of an expert's three matrices.
    """
    expert = _HF + prefix + "experts.{expert}."
    apart, grouped, stored = (
        f"{_MG}mlp.experts.{name}" for name in ("local_experts.{expert}.", "", "experts.{expert}.")
    )
    return (
        Entry(_MG + "mlp.router.weight", {_HF + prefix + "gate.weight": ("experts", "hidden")}, REPLICATED),
        Entry(
            apart + "linear_fc1.weight",
            {f"{expert}{name}.weight": ("moe_ffn", "hidden") for name in (gate, up)},
            EXPERT_GATE_UP,
            aliases=(grouped + "linear_fc1.weight{expert}",),
            stored=(stored + "linear_fc1.weight",),
        ),
        Entry(
            apart + "linear_fc2.weight",
            {f"{expert}{down}.weight": ("hidden", "moe_ffn")},
            EXPERT_DOWN,
            aliases=(grouped + "linear_fc2.weight{expert}",),
            stored=(stored + "linear_fc2.weight",),
        ),
    )


def decoder(attention: tuple[Entry, ...], mlp: tuple[Entry, ...], input_norm: Entry = INPUT_NORM) -> tuple[Entry, ...]:
    """A whole model's table from the entries of a layer's two halves, each with its norm."""
    return (EMBEDDING, input_norm, *attention, *mlp, FINAL_NORM, HEAD)
