"""Parameters of routed experts as transformers has them: for each layer, one with gate and up of all experts (or up
alone), and one with the projections down. Folders hold these parameters, or three matrices for each expert.

PEFT adapts such a parameter by its name (`target_parameters`), with factors of all experts in one tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.tables import Item

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""transformers' names of the parameters: experts without gate have the second instead of the first."""
_WEIGHTS = (".linear_fc1.weight", ".linear_fc2.weight")
"""Ends of Megatron's names of an expert's weights."""
_OTHER_MODULES = {"block_sparse_moe": "mlp"}
"""Name of a module in folders -> in transformers."""
_ALTERNATING = ("gpt_oss",)
"""Model types whose rows of gate and up alternate."""
_IN_OUT_FOR_PEFT = ("gpt_oss",)
"""Model types whose modules declare that their parameters are [experts, in, out] (`is_transposed`). PEFT takes all
others for [experts, out, in], also those of Llama 4, so that its A and B change places there."""


@dataclass(frozen=True)
class ExpertParameter:
    """A parameter of transformers with a matrix of all experts of a layer."""

    name: str
    """Such as model.layers.0.mlp.experts.gate_up_proj, with the folder's beginning of names of tensors."""
    layer: int
    """Index of the transformer layer."""
    experts: int
    outputs: int
    inputs: int
    alternates: bool
    """True if the rows of gate and up alternate; False if those of up follow those of gate."""
    is_swapped: bool
    """True if PEFT's A is of the outputs and its B of the inputs."""


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor of a folder with a part of an expert parameter."""

    parameter: str
    """Name of the parameter."""
    expert: int | None
    """Index of the expert; None for a tensor with all of them."""
    rows: slice
    """Outputs of the matrix that the tensor has."""
    is_transposed: bool
    """True for [experts, in, out]."""


def expert_parameters(family: Family, args: Mapping[str, Any]) -> dict[str, ExpertParameter]:
    """Name -> parameter, of a model with these Megatron arguments."""
    dims, found = family.dims(args), {}
    for item in family.tensors(args):
        if item.expert == 0 and (name := _parameter_of(item)) is not None:
            kind = name.rpartition(".")[2]
            found[name] = ExpertParameter(
                name,
                item.layer,
                dims.experts,
                {GATE_UP: dims.expert_gate_and_up, UP: dims.moe_ffn, DOWN: dims.hidden}[kind],
                dims.moe_ffn if kind == DOWN else dims.hidden,
                alternates=family.model_type in _ALTERNATING and kind == GATE_UP,
                is_swapped=_is_transposed(item) and family.model_type not in _IN_OUT_FOR_PEFT,
            )
    return found


def expert_tensors(family: Family, args: Mapping[str, Any]) -> dict[str, ExpertTensor]:
    """Tensor of a folder -> its place in an expert parameter, of a model with these Megatron arguments."""
    found = {}
    for item in family.tensors(args):
        if item.expert is None or (parameter := _parameter_of(item)) is None:
            continue
        if item.entry.has_all_experts:
            (name,) = item.shapes
            found[name] = ExpertTensor(parameter, None, slice(None), _is_transposed(item))
            continue
        first = 0
        for name, shape in item.shapes.items():
            found[name] = ExpertTensor(parameter, item.expert, slice(first, first + shape[0]), False)
            first += shape[0]
    return found


def _parameter_of(item: Item) -> str | None:
    """Name of the parameter that a weight of an expert belongs to; None for biases."""
    if not item.entry.megatron.endswith(_WEIGHTS):
        return None
    has_gate = item.entry.has_all_experts or len(item.shapes) > 1
    layer = DOWN if item.entry.megatron.endswith(_WEIGHTS[1]) else GATE_UP if has_gate else UP
    path, _, _ = next(iter(item.shapes)).partition(".experts.")
    parent, _, module = path.rpartition(".")
    return f"{parent}.{_OTHER_MODULES.get(module, module)}.experts.{layer}"


def _is_transposed(item: Item) -> bool:
    """True if the folder's tensor is [experts, in, out]."""
    (sizes, *_) = item.entry.sources.values()
    inputs = "hidden" if item.entry.megatron.endswith("linear_fc1.weight") else "moe_ffn"
    return item.entry.has_all_experts and sizes[1] == inputs


def to_peft(a: Tensor, b: Tensor, parameter: ExpertParameter) -> tuple[Tensor, Tensor]:
    """The weights of PEFT's lora_A [experts * rank, in] and lora_B [out, rank * experts].

    Args:
        a: [experts, rank, in]
        b: [experts, out, rank]
        parameter: what they adapt.
    """
    if parameter.is_swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1, 2).contiguous()


def from_peft(a: Tensor, b: Tensor, parameter: ExpertParameter) -> tuple[Tensor, Tensor]:
    """The inverse of `to_peft`."""
    a, b = a.unflatten(0, (parameter.experts, -1)), b.unflatten(1, (-1, parameter.experts)).permute(2, 0, 1)
    return (b.transpose(1, 2), a.transpose(1, 2)) if parameter.is_swapped else (a, b)


def peft_shapes(parameter: ExpertParameter, rank: int) -> dict[str, tuple[int, int]]:
    """Shapes of PEFT's lora_A and lora_B."""
    columns, rows = parameter.inputs, parameter.outputs
    if parameter.is_swapped:
        columns, rows = rows, columns
    return {"A": (parameter.experts * rank, columns), "B": (rows, rank * parameter.experts)}


def peft_modules(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Parameter -> name of the PEFT module with its factors.

    PEFT nests one module for each parameter of the experts, that of gate and up, or of up alone, inside.
    """
    found = {}
    for name in parameters:
        module, _, own = name.rpartition(".")
        is_inner = own != DOWN and f"{module}.{DOWN}" in parameters
        found[name] = f"{module}.base_layer" if is_inner else module
    return found
