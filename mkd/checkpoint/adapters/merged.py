"""A Hugging Face folder whose weights are those of another folder plus adapters: W + scale B A."""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.staged_reads import Staging
from mkd.checkpoint.tokenizer_hash import hash_hex


class Adapters(Protocol):
    """Adapters on disk, by the names of Hugging Face layers."""

    @property
    def layers(self) -> Collection[str]:
        """Names of the layers that have an adapter."""
        ...

    @property
    def scale(self) -> float:
        """Factor of B A."""
        ...

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """The A [rank, in] and the B [out, rank] of a layer, in the stored dtype."""
        ...

    def fingerprint(self) -> str:
        """128-bit hex hash of the adapters."""
        ...


class MergedFolder(HFFolder):
    """See the top of this file. The sum is computed in fp32 and rounded once to the dtype of W."""

    def __init__(self, base: HFFolder, adapters: Adapters) -> None:
        super().__init__(base.path, base.flag)
        self._adapters = adapters

    def read(
        self, name: str, rows: slice | None = None, cols: slice | None = None, staging: Staging | None = None
    ) -> Tensor:
        """See `HFFolder.read`. The sum is computed on the CPU, so that it is the same for every reader."""
        layer = name.removesuffix(".weight")
        if layer == name or layer not in self._adapters.layers:
            return super().read(name, rows, cols, staging)
        merged = self._merge(super().read(name, rows, cols), layer, rows, cols)
        return merged if staging is None else merged.to(staging.device)

    def _merge(self, value: Tensor, layer: str, rows: slice | None, cols: slice | None) -> Tensor:
        a, b = self._adapters.factors(layer)
        wide = torch.promote_types(value.dtype, torch.float32)
        a, b = a[:, cols or slice(None)].to(wide), b[rows or slice(None)].to(wide)
        return torch.addmm(value.to(wide), b, a, alpha=self._adapters.scale).to(value.dtype)

    def fingerprint(self) -> str:
        """See `HFFolder.fingerprint`; it changes with the adapters too."""
        return hash_hex(f"{super().fingerprint()} {self._adapters.fingerprint()}".encode())
