"""Attention of new tokens to cached keys and values, inside Megatron's own attention modules.

Megatron's static inference context keeps the keys and values of a batch of rows that have the same length, applies the
rotary embeddings of the new positions, and turns the causal mask off, because it expects one new token. Here several
tokens may be new: sequence parallelism needs as many as there are tensor-parallel ranks. So the core attention is given
the causal mask that is aligned at the last key.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from mkd.cpu.attention import SegmentAttention


def reason_against_cache(args: Namespace) -> str | None:
    """The reason for which keys and values of a student cannot be cached; None if they can.

    Args:
        args: Megatron's.
    """
    reasons = {
        "context parallelism": args.context_parallel_size > 1,
        "multi-token prediction": bool(args.mtp_num_layers),
        f"attention variant {args.experimental_attention_variant}": args.experimental_attention_variant is not None,
        "--flash-decode": args.flash_decode,
        "fused rotary embeddings of latent attention": args.multi_latent_attention and args.apply_rope_fusion,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@contextmanager
def causal_to_the_last_key(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let every core attention align its causal mask at the last key inside the `with` block."""
    cores = [module.core_attention for chunk in chunks for module in chunk.modules() if isinstance(module, Attention)]
    for core in cores:
        core.forward = partial(_attend_on_cpu, core) if isinstance(core, SegmentAttention) else _aligned(core.forward)
    try:
        yield
    finally:
        for core in cores:
            del core.forward  # the method of the class again


def _attend_on_cpu(
    core: SegmentAttention, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **options: Any
) -> Tensor:
    return core.attend_at_end(query, key, value)


def _aligned(forward: Any) -> Any:
    """Transformer Engine's attention with the mask of the bottom right corner."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *unused: Any, **options: Any) -> Tensor:
        return forward(query, key, value, None, attn_mask_type=AttnMaskType.causal_bottom_right)

    return attend


class KeysAndValues(StaticInferenceContext):
    """Keys and values of the rows of one microbatch, on the layers of this rank."""

    def __init__(self, rows: int, length: int) -> None:
        """Args: rows of the microbatch, and their length at most."""
        super().__init__(max_batch_size=rows, max_sequence_length=length)

    def begin_at(self, position: int) -> None:
        """The next tokens have positions from here on; what is stored there is replaced."""
        self.sequence_len_offset = position
