"""Adapters of a Hugging Face model: which linear layers have one, and where they are in Megatron's layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mkd.checkpoint.adapters.experts import DOWN, GATE_UP, ExpertParameter, expert_parameters
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.layouts import Dims
from mkd.checkpoint.hf.tables import Item
from mkd.config.lora import ALL_LINEAR, EXPERTS, LoraOptions
from mkd.errors import MkdConfigError
from mkd.models.adapted_layers import AdaptedLinear, RowPart

_ATTENTION = "self_attention."
_QKV = f"{_ATTENTION}linear_qkv.weight"
_IN_PROJ = f"{_ATTENTION}in_proj.weight"
"""The input projection of a gated delta net, or of a Mamba 2 mixer."""
_FC1 = ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight")
_LATENTS = tuple(f"{_ATTENTION}linear_{name}_proj.weight" for name in ("q_down", "q_up", "kv_down", "kv_up"))
_COLUMN = (_QKV, *_FC1, f"{_ATTENTION}linear_q_proj.weight", *_LATENTS, _IN_PROJ)
_ROW = (
    *(f"{_ATTENTION}linear_proj.weight", f"{_ATTENTION}out_proj.weight"),
    *("mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight"),
)
_PROJECTIONS = tuple(f"{_ATTENTION}{name}" for name in ("linear_", "in_proj.", "out_proj."))
_FROZEN = {"lm_head": "the LM head", "embed_tokens": "the embedding", "embeddings": "the embedding"}


def adapted_linears(family: Family, args: Mapping[str, Any], options: LoraOptions) -> tuple[AdaptedLinear, ...]:
    """The linear layers with adapters of a model.

    Args:
        family: of the model.
        args: its Megatron arguments.
        options: names of Hugging Face layers, and the rank.

    Raises:
        MkdConfigError: all linear layers are wanted where some have none yet, no layer has one of the names, or the
            rank is too large.
    """
    every = list(_linear_layers(family, args))
    names = {part.layer for linear in every for part in linear.parts}
    without = dict.fromkeys(_without_adapters(family, args), "mkd has no adapters of these layers")
    experts = expert_parameters(family, args)
    if options.modules is None and without:
        raise MkdConfigError(
            f"--kd-lora {options.rank}: {family.architectures[0]} has linear layers of which mkd has no adapters, "
            f"{', '.join(sorted(without))}: give --kd-lora-modules {' '.join(sorted(set(map(_short, names))))}"
        )
    wanted = _chosen(options.modules, names, set(experts), {**without, **family.without_adapters})
    every += [linear for parameter in experts.values() for linear in _routed_linear(parameter)]
    found = []
    for linear in every:
        parts = tuple(part if part.layer in wanted else RowPart(part.channels, None) for part in linear.parts)
        if (chosen := replace(linear, parts=parts)).layers:
            found.append(chosen)
    _check_rank(found, options.rank)
    return tuple(found)


def _linear_layers(family: Family, args: Mapping[str, Any]) -> Iterator[AdaptedLinear]:
    """The linear layers outside of routed experts, with an adapter on each of their Hugging Face layers."""
    dims = family.dims(args)
    for item in family.tensors(args):
        path = _path(item)
        if path in (*_COLUMN, *_ROW) and not set(map(_short, _layers(item))) & family.without_adapters.keys():
            sizes, groups, blocks = _rows(item, path, dims, args)
            parts = _parts(item, sizes, blocks)
            inputs = next(iter(item.shapes.values()))[1]
            name = path.removesuffix(".weight")
            yield AdaptedLinear(item.layer, name, inputs, parts, groups, is_row_parallel=path in _ROW)


def _path(item: Item) -> str:
    """The name of a parameter inside its transformer layer."""
    return item.entry.megatron.partition("{layer}.")[2]


def _rows(
    item: Item, path: str, dims: Dims, args: Mapping[str, Any]
) -> tuple[Sequence[int], int | None, Mapping[str, int]]:
    """Sizes of the parts of a weight in Megatron's order, its groups, and the blocks of Hugging Face layers that have
    several: see `AdaptedLinear` and `RowPart`."""
    if path == _QKV and args.get("attention_output_gate"):
        queries = next(iter(_layers(item)))  # each head's queries, and its gates
        return (dims.query, dims.query, dims.key, dims.key), dims.groups, {queries: dims.heads}
    if path == _QKV:
        return (dims.query, dims.key, dims.key), dims.groups, {}
    if path == _IN_PROJ:
        joined = _layers(item) if len(item.shapes) == 2 else []  # ordered by heads of the keys
        return tuple(item.sections.values()), None, dict.fromkeys(joined, dims.delta_key_heads)
    rows = sum(shape[0] for shape in item.shapes.values())
    if path in _FC1 and (args.get("swiglu") or args.get("quick_geglu")):
        return (rows // 2, rows // 2), None, {}
    return (rows,), None, {}


def _parts(item: Item, sizes: Sequence[int], blocks: Mapping[str, int]) -> tuple[RowPart, ...]:
    """The parts of a weight, each with its Hugging Face layer, which consists of one or several of them in order."""
    parts, rest = [], list(sizes)
    for layer, shape in zip(_layers(item), item.shapes.values(), strict=True):
        missing = shape[0]
        while missing > 0:
            parts.append(RowPart(rest.pop(0), layer, blocks.get(layer, 1)))
            missing -= parts[-1].channels
        assert missing == 0, item.name
    assert not rest, item.name
    return tuple(parts)


def _routed_linear(parameter: ExpertParameter) -> Iterator[AdaptedLinear]:
    """The linear layer of all experts of a layer."""
    is_down = parameter.name.endswith(f".{DOWN}")
    sizes = (parameter.outputs // 2,) * 2 if parameter.name.endswith(f".{GATE_UP}") else (parameter.outputs,)
    blocks = sizes[0] if parameter.alternates else 1
    parts = tuple(RowPart(size, parameter.name, blocks) for size in sizes)
    path = f"mlp.experts.linear_fc{2 if is_down else 1}"
    yield AdaptedLinear(
        parameter.layer, path, parameter.inputs, parts, is_row_parallel=is_down, experts=parameter.experts
    )


def _without_adapters(family: Family, args: Mapping[str, Any]) -> set[str]:
    """Names of the linear layers in place of attention that have no adapters."""
    found = set()
    for item in family.tensors(args):
        path = _path(item)
        if path.startswith(_PROJECTIONS) and path.endswith(".weight") and path not in (*_COLUMN, *_ROW):
            found |= set(map(_short, _layers(item)))
    return found


def _layers(item: Item) -> list[str]:
    """The Hugging Face layers of a weight."""
    return [name.removesuffix(".weight") for name in item.shapes]


def _short(layer: str) -> str:
    """The name of a layer without the path to it."""
    return layer.rpartition(".")[2]


def _chosen(modules: Sequence[str] | None, names: set[str], routed: set[str], without: Mapping[str, str]) -> set[str]:
    """The Hugging Face layers with one of the given names; PEFT's rule: the name itself, or its end after a dot.

    Parameters of routed experts are named with `experts.`, because layers outside of them have the same names.
    """
    chosen = set()
    for module in modules or (ALL_LINEAR,):
        known = routed if EXPERTS in module.split(".") else names
        found = {name for name in known if name == module or name.endswith(f".{module}")}
        found |= names if module == ALL_LINEAR else set()
        if not found:
            raise MkdConfigError(f"--kd-lora-modules {module}: {_reason(module, names, routed, without)}")
        chosen |= found
    return chosen


def _reason(module: str, names: set[str], routed: set[str], without: Mapping[str, str]) -> str:
    short = sorted(set(map(_short, names)))
    known = [*short, *sorted({f"{EXPERTS}.{_short(name)}" for name in routed})]
    listed = f"give some of {', '.join(known)}"
    if module in _FROZEN:
        return f"{_FROZEN[module]} has no adapter in mkd; {listed}"
    if (reason := without.get(_short(module))) is not None:
        return f"{reason}; {listed}"
    if routed and module in ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3"):
        return (
            "only routed experts have layers of this name; transformers keeps all experts of a layer in two "
            f"parameters, {' and '.join(known[len(short) :])}; {listed}"
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
