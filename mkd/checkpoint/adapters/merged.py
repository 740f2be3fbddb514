"""A Hugging Face folder whose weights are those of another folder plus adapters: W + scale B A."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from mkd.checkpoint.adapters.experts import ExpertParameter, ExpertTensor, expert_parameters, expert_tensors
from mkd.checkpoint.hf.check import read_architecture
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
        """The A [rank, in] and the B [out, rank] of a layer, in the stored dtype; [experts, rank, in] and
        [experts, out, rank] of a parameter of routed experts."""
        ...

    def fingerprint(self) -> str:
        """128-bit hex hash of the adapters."""
        ...


class MergedFolder(HFFolder):
    """See the top of this file. The sum is computed in fp32 and rounded once to the dtype of W."""

    def __init__(self, base: HFFolder, adapters: Adapters) -> None:
        super().__init__(base.path, base.flag)
        self._adapters, self._factors = adapters, lru_cache(maxsize=2)(adapters.factors)
        self._experts: Mapping[str, ExpertTensor] = {}
        self._parameters: Mapping[str, ExpertParameter] = {}
        if any(".experts." in layer for layer in adapters.layers):
            family, args = read_architecture(base)
            self._experts, self._parameters = expert_tensors(family, args), expert_parameters(family, args)

    def read(
        self, name: str, rows: slice | None = None, cols: slice | None = None, staging: Staging | None = None
    ) -> Tensor:
        """See `HFFolder.read`. The sum is computed on the CPU, so that it is the same for every reader."""
        layer, part = name.removesuffix(".weight"), self._experts.get(name)
        if part is not None and part.parameter in self._adapters.layers:
            value = super().read(name, rows, cols)
            merged = self._with_experts(value, part, rows or slice(None), cols or slice(None))
        elif layer != name and layer in self._adapters.layers:
            merged = self._sum(super().read(name, rows, cols), *self._factors(layer), rows, cols)
        else:
            return super().read(name, rows, cols, staging)
        return merged if staging is None else merged.to(staging.device)

    def adapted_shape(self, layer: str) -> tuple[int, ...] | None:
        """(out, in) of a linear layer, or (experts, out, in) of a parameter of routed experts; None without it."""
        if layer in self._parameters:
            parameter = self._parameters[layer]
            return parameter.experts, parameter.outputs, parameter.inputs
        weight = self.tensors.get(f"{layer}.weight")
        return None if weight is None else weight[0]

    def _sum(self, value: Tensor, a: Tensor, b: Tensor, rows: slice | None, cols: slice | None) -> Tensor:
        """A block of W + scale B A, from that of W."""
        wide = torch.promote_types(value.dtype, torch.float32)
        a, b = a[:, cols or slice(None)].to(wide), b[rows or slice(None)].to(wide)
        return torch.addmm(value.to(wide), b, a, alpha=self._adapters.scale).to(value.dtype)

    def _with_experts(self, value: Tensor, part: ExpertTensor, rows: slice, cols: slice) -> Tensor:
        """A block of the matrix of one expert, or of the tensor of all experts, whose first axis is the experts."""
        a, b = self._factors(part.parameter)
        if part.expert is not None:
            return self._sum(value, a[part.expert], b[part.expert][part.rows], rows, cols)
        found = []
        for matrix, own_a, own_b in zip(value, a[rows], b[rows], strict=True):
            if part.is_transposed:
                found.append(self._sum(matrix.T, own_a, own_b, None, cols).T)
            else:
                found.append(self._sum(matrix, own_a, own_b, cols, None))
        return torch.stack(found)

    def fingerprint(self) -> str:
        """See `HFFolder.fingerprint`; it changes with the adapters too."""
        return hash_hex(f"{super().fingerprint()} {self._adapters.fingerprint()}".encode())
