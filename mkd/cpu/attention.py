"""Attention over packed rows and context-parallel ranks without Transformer Engine.

Megatron's own attention module supports neither. Here each rank gathers the keys and values of its context-parallel
group (the backward pass sums their gradients over the queries of all ranks), and every segment attends to itself.
"""

import contextlib
import copy
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models import backends
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mkd.distributed.context_parallel import dual_chunk_positions


class SegmentAttention(DotProductAttention):
    """Megatron's core attention, extended to packed rows and context parallelism.

    Without either, it is bit-equal to megatron's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        """See megatron's `DotProductAttention`.

        Args:
            config: of the model.
            layer_number: counted from 1.
            args: as in megatron.
            pg_collection: as in megatron.
            k_channels: width of a head's query and key; in latent attention it may differ from that of the value.
            v_channels: width of a head's value and output, config.kv_channels by default.
            options: as in megatron.
        """
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # megatron asserts 1
        super().__init__(alone, layer_number, *args, pg_collection=pg_collection, **options)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] if windowed else None
        self._cp = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])).cp

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
        """Attention output of this rank's tokens.

        Args:
            query: [s/cp, b, heads/tp, d], or [s/cp, heads/tp, d] if packed.
            key: as the query, with key-value heads.
            value: as the keys.
            attention_mask: None, unless neither packed nor context-parallel.
            attn_mask_type: as in megatron; unused.
            attention_bias: None.
            packed_seq_params: bounds of the segments in the whole row; None without packing.

        Returns:
            [s/cp, b, heads/tp * d], or [s/cp, heads/tp * d] if packed.
        """
        if packed_seq_params is None and self.config.context_parallel_size == 1:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        assert attention_mask is None and attention_bias is None, "only causal attention"
        assert self.attn_mask_type == AttnMaskType.causal, "only causal attention"
        if packed_seq_params is None:
            size = self.config.context_parallel_size
            return self._segments(query, key, value, [0, len(query) * size], size).flatten(-2)
        bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        parts = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self._segments(*parts, bounds, self.config.context_parallel_size).squeeze(1).flatten(-2)

    def _segments(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int], size: int) -> Tensor:
        """[s/cp, b, heads, d] with attention inside each segment of the whole row."""
        if size > 1:
            key, value = (self._whole_row(tensor, bounds, size) for tensor in (key, value))
        places = dual_chunk_positions(bounds, self._cp.rank() if size > 1 else 0, size).to(query.device)
        outputs = []
        for start, end in pairwise(bounds):
            here = slice(start // size, end // size)
            outputs.append(self._attend(query[here], key[start:end], value[start:end], places[here] - start))
        return torch.cat(outputs)

    def _whole_row(self, tensor: Tensor, bounds: list[int], size: int) -> Tensor:
        """[s/cp, ...] of each rank -> [s, ...] in the order of the row. Gradients are summed over ranks."""
        gathered = gather_from_sequence_parallel_region(tensor.contiguous(), group=self._cp)
        order = torch.cat([dual_chunk_positions(bounds, rank, size) for rank in range(size)])
        return gathered.index_select(0, order.argsort().to(tensor.device))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        """Attention of one segment.

        Args:
            query: [n, b, heads, d]
            key: [m, b, groups, d], all tokens of the segment in order.
            value: as the keys.
            positions: [n] positions of the queries in the segment.
        """
        seen = self._seen(positions, len(key))
        if self.softmax_offset is not None:
            key, value, seen = self._add_sinks(key, value, seen)
        dropout = self.attention_dropout.p if self.training else 0.0
        # As in megatron: heads on different tensor-parallel ranks use different random numbers.
        fork = dropout > 0.0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            output = torch.nn.functional.scaled_dot_product_attention(
                *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
                attn_mask=seen,
                dropout_p=dropout,
                scale=self.softmax_scale * (self.scale_mask_softmax.scale or 1.0),
                enable_gqa=True,
            )
        return output.permute(2, 0, 1, 3)

    def _seen(self, positions: Tensor, keys: int) -> Tensor:
        """[n, keys] bool: True for the keys of the segment that a query attends to."""
        distance = positions[:, None] - torch.arange(keys, device=positions.device)
        seen = distance >= 0
        if self._window is not None:
            seen &= distance <= self._window
        return seen

    def _add_sinks(self, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Prepend a key that every query attends to: its score is the head's sink, its value is 0.

        Returns:
            [m + 1, b, groups, d] keys and values, and [heads, n, m + 1] bias of the scores.
        """
        key, value = (torch.cat([torch.zeros_like(tensor[:1]), tensor]) for tensor in (key, value))
        sinks = self.softmax_offset.to(key.dtype)[:, None, None].expand(-1, len(seen), -1)
        hidden = torch.zeros_like(seen, dtype=key.dtype).masked_fill(~seen, float("-inf"))
        return key, value, torch.cat([sinks, hidden.expand(len(sinks), -1, -1)], dim=-1)


def install() -> None:
    """Use this module in megatron's local layer specs."""
    backends.LocalSpecProvider.core_attention = lambda self: SegmentAttention
