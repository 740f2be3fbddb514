"""Adapters of a Hugging Face model: which linear layers have one, and where they are in Megatron's layers."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.layouts import Dims
from mkd.checkpoint.hf.tables import Item
from mkd.config.lora import LoraOptions
from mkd.errors import MkdConfigError
from mkd.models.lora import AdaptedLinear, RowPart

_QKV = "self_attention.linear_qkv.weight"
_FC1 = ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight")
_COLUMN = (_QKV, *_FC1, "self_attention.linear_q_proj.weight")
_ROW = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight")
_PROJECTIONS = ("self_attention.linear_", "self_attention.in_proj.", "self_attention.out_proj.")
_FROZEN = {"lm_head": "the LM head", "embed_tokens": "the embedding"}


def adapted_linears(family: Family, args: Mapping[str, Any], options: LoraOptions) -> tuple[AdaptedLinear, ...]:
    """The linear layers with adapters of a model.

    Args:
        family: of the model.
        args: its Megatron arguments.
        options: names of Hugging Face layers, and the rank.

    Raises:
        MkdConfigError: the family has no adapters, all linear layers are wanted where some have none yet, no layer has
            one of the names, or the rank is too large.
    """
    if args.get("layer_mixers") is not None:
        raise MkdConfigError(
            f"--kd-lora {options.rank}: mkd has no adapters of {family.architectures[0]}, whose layers PEFT names "
            "differently from its folder: leave --kd-lora out, which trains all weights"
        )
    every = list(_linear_layers(family, args))
    names = {part.layer for linear in every for part in linear.parts}
    without = _without_adapters(family, args)
    if options.modules is None and without:
        raise MkdConfigError(
            f"--kd-lora {options.rank}: {family.architectures[0]} has {_attention_kind(args)}, and mkd has no adapters "
            f"of {', '.join(sorted(without))}: give --kd-lora-modules {' '.join(sorted(set(map(_short, names))))}"
        )
    wanted = _chosen(options.modules, names, _routed(family, args), without, _attention_kind(args))
    found = []
    for linear in every:
        parts = tuple(part if part.layer in wanted else RowPart(part.channels, None) for part in linear.parts)
        chosen = AdaptedLinear(
            linear.decoder_layer, linear.path, linear.inputs, parts, linear.groups, linear.is_row_parallel
        )
        if chosen.layers:
            found.append(chosen)
    _check_rank(found, options.rank)
    return tuple(found)


def _linear_layers(family: Family, args: Mapping[str, Any]) -> Iterator[AdaptedLinear]:
    dims = family.dims(args)
    for item in family.tensors(args):
        _, _, path = item.entry.megatron.partition("{layer}.")
        if _has_adapters(path, args):
            yield _adapted(item, path, dims, args)


def _adapted(item: Item, path: str, dims: Dims, args: Mapping[str, Any]) -> AdaptedLinear:
    """The linear layer of a weight, with an adapter on each of its Hugging Face layers."""
    sources = _layers(item)
    shapes = list(item.shapes.values())
    inputs = shapes[0][1]
    rows = sum(shape[0] for shape in shapes)
    groups = None
    if path == _QKV:
        sizes, groups = [dims.query, dims.key, dims.key], dims.groups
    elif path in _FC1 and (args.get("swiglu") or args.get("quick_geglu")):
        sizes = [rows // 2, rows // 2]
    else:
        sizes = [rows]
    assert sum(sizes) == rows and len(sources) in (1, len(sizes)), item.name
    layers = sources if len(sources) == len(sizes) else sources * len(sizes)
    parts = tuple(map(RowPart, sizes, layers))
    return AdaptedLinear(item.layer, path.removesuffix(".weight"), inputs, parts, groups, path in _ROW)


def _routed(family: Family, args: Mapping[str, Any]) -> set[str]:
    """Names of the linear layers of routed experts."""
    return {_short(name) for item in family.tensors(args) if item.expert is not None for name in _layers(item)}


def _has_adapters(path: str, args: Mapping[str, Any]) -> bool:
    """True for a weight inside a transformer layer whose Hugging Face layers may have adapters."""
    return path in (*_COLUMN, *_ROW) and not (path == _QKV and args.get("attention_output_gate"))


def _attention_kind(args: Mapping[str, Any]) -> str:
    """Name of attention with layers that have no adapters."""
    return "latent attention" if args.get("multi_latent_attention") else "a gated delta net and attention with a gate"


def _without_adapters(family: Family, args: Mapping[str, Any]) -> set[str]:
    """Names of the linear layers of attention that have no adapters."""
    found = set()
    for item in family.tensors(args):
        path = item.entry.megatron.partition("{layer}.")[2]
        if path.startswith(_PROJECTIONS) and path.endswith(".weight") and not _has_adapters(path, args):
            found |= set(map(_short, _layers(item)))
    return found


def _layers(item: Item) -> list[str]:
    """The Hugging Face layers of a weight."""
    return [name.removesuffix(".weight") for name in item.shapes]


def _short(layer: str) -> str:
    """The name of a layer without the path to it."""
    return layer.rpartition(".")[2]


def _chosen(modules: Sequence[str] | None, names: set[str], routed: set[str], without: set[str], kind: str) -> set[str]:
    """The Hugging Face layers with one of the given names; PEFT's rule: the name itself, or its end after a dot."""
    if modules is None:
        return names
    chosen = set()
    for module in modules:
        found = {name for name in names if name == module or name.endswith(f".{module}")}
        if not found:
            raise MkdConfigError(f"--kd-lora-modules {module}: {_reason(module, names, routed, without, kind)}")
        chosen |= found
    return chosen


def _reason(module: str, names: set[str], routed: set[str], without: set[str], kind: str) -> str:
    known = sorted(set(map(_short, names)))
    listed = f"give some of {', '.join(known)}"
    if module in _FROZEN:
        return f"{_FROZEN[module]} has no adapter in mkd; {listed}"
    if module in without:
        return f"mkd has no adapters of these layers of {kind}; {listed}"
    if module in routed:
        return (
            "only routed experts have layers of this name, and they have no adapters: transformers keeps all experts "
            f"in one tensor, which PEFT's adapters of linear layers do not reach; {listed}"
        )
    guesses = get_close_matches(module, known, n=1, cutoff=0.5)
    return f"the student has no such linear layer{f' (did you mean {guesses[0]}?)' if guesses else ''}; {listed}"


def _check_rank(linears: Sequence[AdaptedLinear], rank: int) -> None:
    sizes = {}
    for linear in linears:
        for layer in linear.layers:
            sizes[layer] = (sum(part.channels for part in linear.parts if part.layer == layer), linear.inputs)
    layer = min(sizes, key=lambda name: min(sizes[name]))
    if rank > (least := min(sizes[layer])):
        raise MkdConfigError(
            f"--kd-lora {rank}: {layer} is {' x '.join(map(str, sizes[layer]))}, so that a rank above {least} adds "
            f"nothing: give at most {least}, or leave the layer out of --kd-lora-modules"
        )
