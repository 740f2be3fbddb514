"""An MLP with a norm of its output."""

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default
from torch import Tensor


class PostNormMLP(MLP):
    """Megatron's MLP without biases, followed by a norm before the residual is added."""

    @classmethod
    def with_norm(
        cls,
        norm: LayerNormBuilder,
        submodules: MLPSubmodules,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ) -> "PostNormMLP":
        """A builder for `TransformerLayerSubmodules.mlp` once `norm` and `submodules` are bound."""
        mlp = cls.as_mlp_submodule(submodules, config, pg_collection, **options)
        mlp.post_layernorm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        return mlp

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> ([s, b, H], no bias); s / tp under sequence parallelism."""
        output, bias = super().forward(hidden_states, per_token_scale, **options)
        assert bias is None, "only MLPs without biases"
        return self.post_layernorm(output), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """As in megatron, which has no replicated parameters in an MLP: its copies of the norm's would collide."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        name = f"{prefix}post_layernorm."
        return state | sharded_state_dict_default(
            self.post_layernorm, name, sharded_offsets, metadata, tp_group=self.tp_group
        )
