"""Attention of one new token per text to the cached keys and values of the text."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class ScoreOptions(NamedTuple):
    """The properties of a core attention module that change its scores."""

    scale: float
    window: int | None
    """The farthest key of a query, counted back from its own position; None for all."""
    softcap: float | None
    """c of scores c tanh(score / c)."""
    sinks: Tensor | None
    """[heads] score of a key whose value is 0."""

    @classmethod
    def of(cls, core: nn.Module) -> "ScoreOptions":
        """Those of Megatron's local core attention, or of Transformer Engine's."""
        if hasattr(core, "scale_mask_softmax"):  # local
            scale = core.softmax_scale * (core.scale_mask_softmax.scale or 1.0)
            window = core.scale_mask_softmax.window_size
        else:
            scale, window = core.softmax_scale, core.window_size
        left = None if window is None or window[0] < 0 else window[0]
        sinks = None if core.softmax_offset is None else core.softmax_offset.detach().flatten()
        softcap = getattr(core, "softcap", None) or None  # Transformer Engine writes 0 for none
        return cls(scale, left, softcap, sinks)


def store_reference(new: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, positions: Tensor) -> None:
    """Store the key and the value of the token at a position of each text: the definition.

    Args:
        new: [R, groups, d] and [R, groups, d_v].
        keys: see `attend_reference`, changed in place.
        values: see `attend_reference`, changed in place.
        positions: see `attend_reference`.
    """
    texts = torch.arange(len(positions), device=positions.device)
    for stored, one in zip((keys, values), new, strict=True):
        stored[texts, :, positions] = one


def attend_reference(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, options: ScoreOptions) -> Tensor:
    """Attention of the token at a position of each text to the tokens up to it: the definition.

    Args:
        query: [R, heads, d].
        keys: [R, groups, length, d].
        values: [R, groups, length, d_v].
        positions: [R] int64.
        options: see `ScoreOptions`.

    Returns:
        [R, heads, d_v] in the dtype of the values. Scores exist in memory, in fp32 at least.
    """
    texts, heads, width = query.shape
    groups, length = keys.shape[1:3]
    grouped = query.view(texts, groups, heads // groups, width)
    scores = (grouped @ keys.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    distance = positions[:, None] - torch.arange(length, device=query.device)
    seen = distance >= 0
    if options.window is not None:
        seen &= distance <= options.window
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, groups, -1, 1).expand(texts, -1, -1, -1)
        scores = torch.cat((scores, sinks), dim=-1)
    probabilities = scores.softmax(dim=-1)[..., :length].to(values.dtype)
    return (probabilities @ values).reshape(texts, heads, -1)
