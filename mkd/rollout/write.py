"""Rollouts: the entry point."""

from collections.abc import Sequence

from torch import nn

from mkd.distributed.groups import Groups
from mkd.rollout.engine.cached import write_cached
from mkd.rollout.engine.forward import evaluating
from mkd.rollout.engine.uncached import write_uncached
from mkd.rollout.interface import Decoding, Delivery, Engine, Request, WrittenText

_ENGINES = {"cached": write_cached, "uncached": write_uncached}


def write_texts(
    chunks: Sequence[nn.Module],
    groups: Groups,
    requests: Sequence[Request],
    options: Decoding,
    engine: Engine,
    delivery: Delivery | None = None,
) -> list[WrittenText]:
    """Continue each prompt. Collective over all ranks.

    No state of a random number generator is used or changed, and the modes of the model chunks are restored.

    Args:
        chunks: the student's model chunks on this rank.
        groups: its layout.
        requests: the prompts, the same on all ranks; none may be empty.
        options: see `Decoding`.
        engine: the method; see `mkd.rollout.engine.attention.reason_against_cache`.
        delivery: the use of texts before all are written; None for none.

    Returns:
        One text per request, the same on all ranks.
    """
    with evaluating(chunks):
        written = _ENGINES[engine](chunks, groups, requests, options, delivery)
    return [WrittenText(tuple(new), ended=options.ends(new)) for new in written]
