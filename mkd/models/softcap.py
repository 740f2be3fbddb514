"""Attention whose scores have a softcap."""

import contextlib
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mkd.cpu.attention import SegmentAttention


class SoftcapAttention(SegmentAttention):
    """Causal core attention with scores c tanh(score / c), on any device, with packed rows and context parallelism.

    Transformer Engine and torch's fused attention have no softcap: scores and probabilities of a segment exist in
    memory, in fp32.
    """

    def __init__(self, *args: Any, softcap: float, **options: Any) -> None:
        """See `SegmentAttention`; `softcap` is c."""
        super().__init__(*args, **options)
        assert self.softmax_offset is None, "only attention without sinks"
        self.softcap = softcap

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """See `SegmentAttention.forward`; `attention_mask` is not read: it is causal."""
        if packed_seq_params is not None:
            return super().forward(query, key, value, None, attn_mask_type, None, packed_seq_params)
        assert attention_bias is None and self.attn_mask_type == AttnMaskType.causal, "only causal attention"
        size = self.config.context_parallel_size
        return self._segments(query, key, value, [0, len(query) * size], size).flatten(-2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        """See `SegmentAttention`."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        shared = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
        scores = (query @ key.transpose(-1, -2)).float() * scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~self._seen(positions, key.shape[2]), float("-inf"))
        probabilities = scores.softmax(dim=-1).to(value.dtype)
        # As in megatron: heads on different tensor-parallel ranks use different random numbers.
        fork = self.training and self.attention_dropout.p > 0.0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            probabilities = self.attention_dropout(probabilities)
        return (probabilities @ value).permute(2, 0, 1, 3)
