"""Attention to cached keys and values, inside Megatron's own attention modules.

Prompts are read as rows of tokens, as in training, and their keys and values are stored. After that each text has one
new token per forward pass, and all of them are one row [1, R] whose "sequence" are the texts. Megatron's modules
compute such a row as any other: linear layers, norms and sequence parallelism do not depend on the position of a token.
Two kinds of modules do, and have another forward method meanwhile: rotary embeddings, which return the angles of the
position of each text, and core attention, in which each token attends to the keys and values of its own text.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor, nn

from mkd.rollout.engine.cache_attention import ScoreOptions, attend_reference, store_reference


def reason_against_cache(args: Namespace) -> str | None:
    """The reason for which keys and values of a student cannot be cached; None if they can.

    Args:
        args: Megatron's.
    """
    reasons = {
        "context parallelism": args.context_parallel_size > 1,
        "multi-token prediction": bool(args.mtp_num_layers),
        f"attention variant {args.experimental_attention_variant}": args.experimental_attention_variant is not None,
        "Mamba layers": getattr(args, "layer_mixers", None) is not None,
        "--flash-decode": args.flash_decode,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass
class KeysAndValues:
    """Keys and values of the texts of one microbatch, on the layers of this rank."""

    slots: int
    """Number of texts."""
    length: int
    """Tokens per text at most."""
    _layers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of_layer(self, core: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[slots, groups, length, d] keys and values of a layer, with the widths and the dtypes of new ones.

        They are 0 before they are stored, since what no query attends to is multiplied by 0.
        """
        if core not in self._layers:
            self._layers[core] = tuple(
                new.new_zeros(self.slots, new.shape[2], self.length, new.shape[3]) for new in (key, value)
            )
        return self._layers[core]


@dataclass(frozen=True)
class PromptPass:
    """A forward pass over prompts [n, s], from position 0 on."""

    cache: KeysAndValues
    slots: Tensor
    """[m] int64 slots of the first m rows; the other rows are padding, and not stored."""


@dataclass(frozen=True)
class TokenPass:
    """A forward pass over one token of each text [1, R]."""

    cache: KeysAndValues
    positions: Tensor
    """[R] int64 position of the token."""
    end: int
    """All positions are below it."""


@dataclass
class CachedAttention:
    """The forward pass that the modules compute."""

    length: int
    """All positions are below it."""
    now: PromptPass | TokenPass | None = None


@contextmanager
def cached_attention(chunks: Sequence[nn.Module], length: int) -> Iterator[CachedAttention]:
    """Let attention and rotary embeddings compute `CachedAttention.now` inside the `with` block.

    Args:
        chunks: the model chunks on this rank.
        length: all positions are below it.
    """
    state = CachedAttention(length)
    modules = [module for chunk in chunks for module in chunk.modules()]
    ropes = [module for module in modules if isinstance(module, RotaryEmbedding)]
    attentions = [module for module in modules if isinstance(module, Attention)]
    cores = [module.core_attention for module in attentions]
    # The fused rope of latent attention reads tables of its own, in the order of the positions.
    fused = [one.config for one in attentions if isinstance(one, MultiLatentAttention) and one.config.apply_rope_fusion]
    methods = [(rope, _angles(rope.forward, state)) for rope in ropes]
    methods += [(core, _attention(core, core.forward, state)) for core in cores]
    for module, forward in methods:  # nothing fails from here on before the block
        module.forward = forward
    for config in fused:
        config.apply_rope_fusion = False
    try:
        yield state
    finally:
        for module, _ in methods:
            del module.forward  # the method of the class again
        for config in fused:
            config.apply_rope_fusion = True


def _angles(forward: Any, state: CachedAttention) -> Any:
    """[R, 1, 1, d] angles of the positions of a row of texts; with yarn's factor where the module returns it."""
    table: list[Any] = []

    def angles(length: int, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state.now, TokenPass):
            return forward(length, *args, **kwargs)
        if not table:
            table.append(forward(state.length))
        if isinstance(table[0], tuple):
            values, factor = table[0]
            return values[state.now.positions], factor
        return table[0][state.now.positions]

    return angles


def _attention(core: nn.Module, forward: Any, state: CachedAttention) -> Any:
    """Core attention that stores keys and values, and attends to those of each text where one token is new."""
    options = ScoreOptions.of(core)

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        now = state.now
        keys, values = now.cache.of_layer(core, key, value)
        if isinstance(now, PromptPass):
            count, length = len(now.slots), min(len(key), now.cache.length)
            for stored, new in ((keys, key), (values, value)):
                stored[now.slots, :, :length] = new[:length, :count].permute(1, 2, 0, 3)
            return forward(query, key, value, *args, **kwargs)
        new = key[:, 0], value[:, 0]
        if query.is_cuda:  # whose kernel reads no more than it needs: a CUDA graph serves all positions
            from mkd.rollout.engine.attention_kernel import attend_triton

            output = attend_triton(query[:, 0], new, keys, values, now.positions, options)
        else:
            store_reference(new, keys, values, now.positions)
            keys, values = keys[:, :, : now.end], values[:, :, : now.end]
            output = attend_reference(query[:, 0], keys, values, now.positions, options)
        return output.flatten(1).unsqueeze(1)

    return attend
