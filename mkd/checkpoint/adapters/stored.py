"""Adapters in a Megatron checkpoint, which holds them without the frozen weights."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.config.lora import LoraOptions
from mkd.errors import MkdConfigError
from mkd.models.lora import KEY_PREFIX, AdaptedLinear


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

    def weight_shape(self, layer: str) -> tuple[int, int]:
        """(out, in) of the weight that the adapter of a Hugging Face layer belongs to.

        Raises:
            MkdCheckpointError: a factor is missing, or has another rank.
        """
        rank, parts = self.options.rank, [self.shapes[key] for key in self._parts(layer)]
        a = self.shapes.get(f"{layer}.lora_A", ())
        if len(a) != 2 or a[0] != rank or not parts or any(len(b) != 2 or b[1] != rank for b in parts):
            raise self.folder.error(f"the adapter of {layer} is not one of rank {rank}: {list(a)}, {parts}")
        return sum(b[0] for b in parts), a[1]

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """The A [rank, in] and the B [out, rank] of a Hugging Face layer, in the stored dtype.

        Raises:
            MkdCheckpointError: they are missing or damaged.
        """
        return self._read(f"{layer}.lora_A"), torch.cat([self._read(key) for key in self._parts(layer)])

    def _parts(self, layer: str) -> Iterator[str]:
        key = f"{layer}.lora_B"
        if key in self.shapes:
            yield key
            return
        yield from (part for part in (f"{key}.{number}" for number in range(3)) if part in self.shapes)

    def _read(self, key: str) -> Tensor:
        stored = KEY_PREFIX + key
        if key not in self.shapes:
            raise self.folder.error(f"tensor {stored} is missing")
        dtype = self.folder.metadata.state_dict_metadata[stored].properties.dtype
        state = {stored: torch.empty(self.shapes[key], dtype=dtype)}
        self.folder.load(state)
        return state[stored]


def short_names(layers: Iterable[str]) -> list[str]:
    """Names of Hugging Face layers without the path to them, sorted: q_proj, v_proj."""
    return sorted({layer.rpartition(".")[2] for layer in layers})
