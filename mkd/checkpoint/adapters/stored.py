"""Adapters in a Megatron checkpoint, which holds them without the frozen weights."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.config.lora import LoraOptions
from mkd.errors import MkdConfigError
from mkd.models.adapted_layers import AdaptedLinear, short_name
from mkd.models.lora import KEY_PREFIX


@dataclass(frozen=True)
class StoredAdapters:
    """The adapters of a checkpoint; no tensor is read before `factor`."""

    folder: MegatronFolder

    @cached_property
    def options(self) -> LoraOptions:
        """Rank and alpha.

        Raises:
            MkdCheckpointError: the checkpoint does not record them.
        """
        text = getattr(self.folder.args, "kd_lora", None)
        try:
            return LoraOptions.parse(text if isinstance(text, str) else repr(text), None)
        except MkdConfigError as error:
            raise self.folder.error(f"{self.folder.iteration_dir.name} records no adapters ({error})") from error

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key without `KEY_PREFIX` -> shape of each factor."""
        return {
            key.removeprefix(KEY_PREFIX): tuple(stored.size)
            for key, stored in self.folder.metadata.state_dict_metadata.items()
            if key.startswith(KEY_PREFIX) and isinstance(stored, TensorStorageMetadata)
        }

    @cached_property
    def layers(self) -> list[str]:
        """Names of the Hugging Face layers that have an adapter, sorted."""
        return sorted({key.partition(".lora_")[0] for key in self.shapes})

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.options.scale

    def fingerprint(self) -> str:
        """128-bit hex hash of the checkpoint."""
        return self.folder.fingerprint()

    @property
    def modules(self) -> list[str]:
        """Names of the Hugging Face layers without the path to them."""
        return short_names(self.layers)

    def are_of(self, linears: Sequence[AdaptedLinear], options: LoraOptions) -> bool:
        """True if these are the adapters of a model, with the same rank and scale."""
        needed = {factor.key: factor.shape(options.rank) for linear in linears for factor in linear.factors}
        return self.shapes == needed and self.options.scale == options.scale

    def weight_shape(self, layer: str) -> tuple[int, ...]:
        """(out, in) of the weight that the adapter of a Hugging Face layer belongs to; (experts, out, in) of experts.

        Raises:
            MkdCheckpointError: a factor is missing, or has another rank.
        """
        rank, (blocks, keys) = self.options.rank, self._parts(layer)
        a, parts = self.shapes.get(f"{layer}.lora_A", ()), [self.shapes[key] for key in keys]
        axes, experts = len(a), a[:-2]
        fits = axes in (2, 3) and a[-2] == rank and parts
        if not fits or any(len(b) != axes or (b[:-2], b[-1]) != (experts, rank) or b[-2] % blocks for b in parts):
            raise self.folder.error(f"the adapter of {layer} is not one of rank {rank}: {list(a)}, {parts}")
        return (*experts, sum(b[-2] for b in parts), a[-1])

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """The A [rank, in] and the B [out, rank] of a Hugging Face layer, in the stored dtype; with a leading axis of
        experts for a parameter of routed experts.

        Raises:
            MkdCheckpointError: they are missing or damaged.
        """
        blocks, keys = self._parts(layer)
        parts = [self._read(key).unflatten(-2, (blocks, -1)) for key in keys]
        return self._read(f"{layer}.lora_A"), torch.cat(parts, dim=-2).flatten(-3, -2)

    def _parts(self, layer: str) -> tuple[int, list[str]]:
        """The blocks of the rows of a layer, and the keys of its B's in order; see `RowPart`."""
        found = {}
        for key in self.shapes:
            if key.startswith(f"{layer}.lora_B"):
                blocks, number = _suffix_of(key.removeprefix(f"{layer}.lora_B"))
                found[number] = (blocks, key)
        numbers = {blocks for blocks, _ in found.values()}
        if len(numbers) != 1 or sorted(found) != list(range(len(found))):
            raise self.folder.error(f"the adapter of {layer} has the parts {[key for _, key in found.values()]}")
        return numbers.pop(), [found[number][1] for number in sorted(found)]

    def _read(self, key: str) -> Tensor:
        stored = KEY_PREFIX + key
        if key not in self.shapes:
            raise self.folder.error(f"tensor {stored} is missing")
        dtype = self.folder.metadata.state_dict_metadata[stored].properties.dtype
        state = {stored: torch.empty(self.shapes[key], dtype=dtype)}
        self.folder.load(state)
        return state[stored]


def _suffix_of(text: str) -> tuple[int, int]:
    """(blocks, number) of a part; the inverse of `part_suffix`. -1 for text that is not a suffix."""
    match = re.fullmatch(r"(?:\.blocks([1-9][0-9]{0,8}))?\.([0-9])|", text)
    if match is None:
        return -1, -1
    return int(match[1] or 1), int(match[2] or 0)


def short_names(layers: Iterable[str]) -> list[str]:
    """Names of Hugging Face layers without the path to them, sorted; see `short_name`."""
    return sorted(set(map(short_name, layers)))
