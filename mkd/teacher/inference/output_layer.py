"""The final norm and the LM head of a Hugging Face folder, with which hidden states become log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.casts import CastCheck
from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.layouts import TensorShard
from mkd.checkpoint.hf.load import HFParameters
from mkd.losses import LogitMap

_NORM, _HEAD = "decoder.final_layernorm", "output_layer.weight"
_BLOCK = 1024
"""Tokens that are normalized at a time, in fp32."""


@dataclass(frozen=True)
class FinalNorm:
    """A model's last norm, computed in fp32."""

    weight: Tensor
    """[H] fp32 factors."""
    bias: Tensor | None
    """[H] fp32"""
    epsilon: float
    centers: bool
    """True to subtract the mean first (LayerNorm)."""
    dtype: torch.dtype
    """Dtype of the results."""

    def __call__(self, states: Tensor) -> Tensor:
        """[n, H] states in any dtype -> final hidden states."""
        found = torch.empty(states.shape, dtype=self.dtype, device=states.device)
        for part, out in zip(states.split(_BLOCK), found.split(_BLOCK), strict=True):
            values = part.float()
            if self.centers:
                values = values - values.mean(dim=1, keepdim=True)
            values = values * torch.rsqrt(values.square().mean(dim=1, keepdim=True) + self.epsilon) * self.weight
            out.copy_(values if self.bias is None else values + self.bias)
        return found

    def to(self, device: str) -> "FinalNorm":
        """The same on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return FinalNorm(self.weight.to(device), bias, self.epsilon, self.centers, self.dtype)


@dataclass(frozen=True)
class OutputLayer:
    """Final norm and LM head of a folder, of which no other weights are read."""

    folder: HFFolder
    family: Family
    architecture: Mapping[str, Any]
    """Megatron argument name -> value."""

    @classmethod
    def of(cls, folder: HFFolder) -> "OutputLayer":
        """Nothing is read yet.

        Raises:
            MkdCheckpointError: the family is not known, or has another kind of norm.
        """
        family, architecture = read_architecture(folder)
        known = {name for item in family.tensors(architecture) for name in item.parameters}
        if not {f"{_NORM}.weight", _HEAD} <= known or architecture["normalization"] not in ("RMSNorm", "LayerNorm"):
            raise folder.error(
                f"the final norm or the LM head of {family.architectures[0]} is of a kind that is not computed from "
                "hidden states of a server: use mkd serve-teacher, or the most probable tokens (--kd-top-k)"
            )
        return cls(folder, family, architecture)

    @property
    def width(self) -> int:
        """H"""
        return self.architecture["hidden_size"]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.architecture["num_layers"]

    @property
    def logit_map(self) -> LogitMap:
        """Scale and softcap of the logits; see `mkd.models.gpt.logit_scale`."""
        values = self.architecture
        scale = values.get("mup_output_mult", 1.0) if values.get("use_mup") else 1.0
        return LogitMap(scale, values.get("logit_softcap"))

    def norm(self, dtype: torch.dtype) -> FinalNorm:
        """Read the final norm; its results are in `dtype`."""
        values, whole, shape = self.architecture, TensorShard(0, 1), (self.width,)
        parameters = HFParameters(self.folder, self.family, values)
        weight = parameters.read(f"{_NORM}.weight", whole, shape).float()
        has_bias = any(f"{_NORM}.bias" in item.parameters for item in self.family.tensors(values))
        return FinalNorm(
            weight + 1.0 if values.get("layernorm_zero_centered_gamma") else weight,
            parameters.read(f"{_NORM}.bias", whole, shape).float() if has_bias else None,
            values["layernorm_epsilon"],
            centers=values["normalization"] == "LayerNorm",
            dtype=dtype,
        )

    def shard(self, rank: int, size: int, padded_vocab: int, vocab: int, dtype: torch.dtype) -> Tensor:
        """[padded_vocab / size, H] rows of the LM head of a tensor-parallel rank; those from `vocab` up are 0.

        Raises:
            MkdCheckpointError: a value does not fit into the dtype.
        """
        parameters = HFParameters(self.folder, self.family, self.architecture, vocab)
        stored = parameters.read(_HEAD, TensorShard(rank, size), (padded_vocab // size, self.width))
        casts = CastCheck(self.folder.error)
        head = casts.cast(_HEAD, stored, dtype)
        casts.warn()
        return head

    def log_ratios(self, states: Tensor, ids: Tensor) -> tuple[Tensor, float]:
        """Logarithms of ratios of probabilities, from a few rows of the LM head.

        Args:
            states: [n, H] before the final norm.
            ids: [n, K] int64.

        Returns:
            ([n, K] fp32 log-probabilities of the ids less that of the first one, largest magnitude of a logit).
        """
        rows = [self.folder.read(self._head_name, slice(one, one + 1)) for one in ids.flatten().tolist()]
        products = torch.cat(rows).float().view(*ids.shape, -1) @ self._precise_norm(states).unsqueeze(2)
        logits = self.logit_map.apply_(products.squeeze(2))
        return logits - logits[:, :1], float(logits.abs().max())

    @cached_property
    def _precise_norm(self) -> FinalNorm:
        return self.norm(torch.float32)

    @cached_property
    def _head_name(self) -> str:
        """The tensor of the LM head in the folder."""
        (name,) = next(item for item in self.family.tensors(self.architecture) if item.name == _HEAD).shapes
        is_tied = not self.architecture["untie_embeddings_and_output_weights"]
        return self.family.tied.get(name, name) if is_tied else name
