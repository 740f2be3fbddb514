"""Linear layers of a model that have adapters: where they are in Megatron's layers, and how their factors are stored.

Megatron computes several Hugging Face layers with one matrix. Each keeps an A and a B of its own; the rows of the B's
are placed in the order of the whole matrix.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPart:
    """Output channels of a Hugging Face linear layer that follow each other inside a linear layer of Megatron."""

    channels: int
    """Output channels on all tensor-parallel ranks together."""
    layer: str | None
    """Name of the Hugging Face layer, such as model.layers.0.self_attn.q_proj; None if it has no adapter."""
    blocks: int = 1
    """Equal blocks of the Hugging Face layer's rows, such as its heads; each holds a share of all parts of the layer,
    one after another."""


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of Megatron with the Hugging Face layers in it that have adapters."""

    decoder_layer: int
    """Index of the transformer layer in the whole model, from 0."""
    path: str
    """Name of the linear layer inside the transformer layer, such as self_attention.linear_qkv. That of routed experts
    is mlp.experts.linear_fc1 or linear_fc2."""
    inputs: int
    """Input channels on all tensor-parallel ranks together."""
    parts: tuple[RowPart, ...]
    """The parts of the weight, in the order of Megatron's rows."""
    groups: int | None = None
    """Number of blocks of rows, each with an equal share of every part; None for one block per rank."""
    is_row_parallel: bool = False
    """True if tensor parallelism shards the inputs, False if it shards the outputs."""
    experts: int | None = None
    """Number of routed experts, each of which has factors of its own; None for a layer outside of them."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The Hugging Face layers that have adapters."""
        return tuple(dict.fromkeys(part.layer for part in self.parts if part.layer is not None))

    @property
    def factors(self) -> tuple["Factor", ...]:
        """The factors of all adapters: for each Hugging Face layer its A, then a B for each of its parts."""
        found = []
        for index, layer in enumerate(self.layers):
            found.append(Factor(layer, index, None, f"{layer}.lora_A", self.inputs, experts=self.experts))
            numbers = [number for number, part in enumerate(self.parts) if part.layer == layer]
            blocks = self.parts[numbers[0]].blocks
            for count, number in enumerate(numbers):
                key = f"{layer}.lora_B" + part_suffix(blocks, count if len(numbers) > 1 else None)
                before = sum(self.parts[other].channels for other in numbers[:count]) // blocks
                channels = self.parts[number].channels
                found.append(Factor(layer, index, number, key, channels, before, blocks, self.experts))
        return tuple(found)

    def parameters(self, rank: int) -> int:
        """Number of parameters of all factors."""
        return sum(factor.channels * rank * (self.experts or 1) for factor in self.factors)


def short_name(layer: str) -> str:
    """The name of a Hugging Face layer without the path to it: q_proj, or experts.down_proj for routed experts."""
    path, _, name = layer.rpartition(".")
    return f"experts.{name}" if path.rpartition(".")[2] == "experts" else name


def part_suffix(blocks: int, count: int | None) -> str:
    """End of the key of the B of a part, after `lora_B`; `count` is None for the only part of a layer."""
    if count is None:
        return ""
    return f".{count}" if blocks == 1 else f".blocks{blocks}.{count}"


class Factor(NamedTuple):
    """An A [rank, channels], or the B [channels, rank] of one part; with a leading axis if experts have their own."""

    layer: str
    """Name of the Hugging Face layer."""
    index: int
    """Index of the Hugging Face layer among those of the linear layer."""
    part: int | None
    """Index of B's part among those of the linear layer; None for an A."""
    key: str
    """Key in a checkpoint, without the prefix of adapters."""
    channels: int
    """Input channels of an A, output channels of a B, on all tensor-parallel ranks together."""
    first: int = 0
    """Index of B's first row in each block of the B of the Hugging Face layer."""
    blocks: int = 1
    """See `RowPart`."""
    experts: int | None = None
    """See `AdaptedLinear`."""

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return f"A{self.index}" if self.part is None else f"B{self.part}"

    def shape(self, rank: int) -> tuple[int, ...]:
        """Shape on all tensor-parallel and expert-parallel ranks together."""
        own = (rank, self.channels) if self.part is None else (self.channels, rank)
        return own if self.experts is None else (self.experts, *own)

    def of(self, whole: Tensor) -> Tensor:
        """The factor, unsharded, in the A [..., rank, in] or B [..., out, rank] of the Hugging Face layer."""
        if self.part is None:
            return whole
        blocks = whole.unflatten(-2, (self.blocks, -1))
        return blocks.narrow(-2, self.first, self.channels // self.blocks).flatten(-3, -2)


def initial_a(layer: str, rank: int, inputs: int, seed: int) -> Tensor:
    """[rank, inputs] fp32 on the CPU: Kaiming-uniform values with a = sqrt(5), as in PEFT."""
    digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    bound = inputs**-0.5
    return torch.empty(rank, inputs, device="cpu").uniform_(-bound, bound, generator=generator)
