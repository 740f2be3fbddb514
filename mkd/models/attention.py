"""Self-attention with a norm of its output, norms over the whole width of queries and keys, or a rope of its own."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mkd.models.layer_options import LayerOptions


class WholeWidthNorm(nn.Module):
    """RMSNorm over all heads together, of which each tensor-parallel rank has its own."""

    def __init__(self, config: TransformerConfig, heads: int, width: int, group: ProcessGroup) -> None:
        """A norm with weights of 1.

        Args:
            config: of the model.
            heads: number of heads on all ranks.
            width: width of a head.
            group: the tensor-parallel ranks.
        """
        super().__init__()
        self._eps, self._channels, self._group = config.layernorm_epsilon, heads * width, group
        own = self._channels // group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """[s, b, heads / tp, d] -> the same shape; the sum of squares is taken over the heads of all ranks."""
        wide = heads.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self._group.size() > 1:
            # Each rank's output depends on the sum: its gradient is summed over the ranks too.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self._group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self._group)
        wide = wide * torch.rsqrt(squares / self._channels + self._eps)
        return (wide * self.weight.float().view(heads.shape[-2:])).to(heads.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """As in megatron: the weight is sharded over tensor-parallel ranks along its only axis."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ExtendedSelfAttention(SelfAttention):
    """Megatron's self-attention with the properties of `LayerOptions`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        post_norm: LayerNormBuilder | None,
        options: LayerOptions,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        """See megatron's `SelfAttention`.

        Args:
            config: of the model.
            submodules: as in megatron.
            layer_number: counted from 1.
            args: as in megatron.
            post_norm: builder of a norm of the output, before the residual is added; None without one.
            options: of the model's layers.
            pg_collection: as in megatron.
            kwargs: as in megatron.
        """
        super().__init__(config, submodules, layer_number, *args, pg_collection=pg_collection, **kwargs)
        if options.whole_width_qk_norms:
            width, tp = config.kv_channels, self.pg_collection.tp
            self.q_layernorm = WholeWidthNorm(config, config.num_attention_heads, width, tp)
            self.k_layernorm = WholeWidthNorm(config, config.num_query_groups, width, tp)
        self.post_layernorm = None
        if post_norm is not None:
            self.post_layernorm = post_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

        self._local_rope = None
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        if options.local_rotary_base is not None and windowed:
            self._local_rope = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=options.local_rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
            self._yarn_concentration_factor = 1.0  # Megatron's factor of the other layers' sine and cosine

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in megatron: (output [s, b, H], its bias); s / tp under sequence parallelism."""
        if self._local_rope is not None and rotary_pos_emb is not None:
            packed, cp = packed_seq_params is not None, self.pg_collection.cp
            length = len(rotary_pos_emb) * (1 if packed else cp.size())  # megatron cuts it for unpacked rows only
            rotary_pos_emb = self._local_rope(length, packed_seq=packed, cp_group=cp)
        output, bias = super().forward(
            hidden_states, *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs
        )
        if self.post_layernorm is None:
            return output, bias
        assert bias is None, "only attention without biases"
        return self.post_layernorm(output), None
