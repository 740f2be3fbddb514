"""Rollouts without a cache: one forward pass over the whole text per token. Works under every layout."""

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups
from mkd.rollout.engine.forward import run_forward
from mkd.rollout.engine.sampler import NextToken, position_key, request_key
from mkd.rollout.interface import Decoding, Delivery, Request

_LENGTH_STEP = 16
"""Rows are padded to a multiple of this number of tokens, so that few shapes occur; FP8 needs it too."""


def write_uncached(
    chunks: Sequence[nn.Module],
    groups: Groups,
    requests: Sequence[Request],
    options: Decoding,
    delivery: Delivery | None = None,
) -> list[list[int]]:
    """The tokens written after each prompt, the same on all ranks. Collective over all ranks.

    All data-parallel ranks compute the same texts, since they may share experts.

    Args:
        chunks: the student's model chunks on this rank, in evaluation mode.
        groups: its layout.
        requests: the same on all ranks.
        options: see `Decoding`.
        delivery: the use of texts before all are written; None for none.
    """
    texts, written = [list(request.prompt) for request in requests], [[] for _ in requests]
    keys, done = [request_key(request, options.seed) for request in requests], [False] * len(requests)
    for _ in range(options.tokens):
        for number, token in enumerate(_next_tokens(chunks, groups, texts, keys, options)):
            if not done[number]:
                texts[number].append(token)
                written[number].append(token)
                done[number] = options.ends(written[number])
                if delivery is not None and (done[number] or len(written[number]) == options.tokens):
                    delivery.done(number, written[number])
        if all(done):
            break
    return written


def _next_tokens(
    chunks: Sequence[nn.Module],
    groups: Groups,
    texts: Sequence[Sequence[int]],
    keys: Sequence[int],
    options: Decoding,
) -> list[int]:
    """The token after each text, the same on all ranks."""
    batches = _microbatches(texts, keys, options, groups)
    choose = NextToken.of(groups, options)

    def forward_step(inputs: Iterator[tuple[KDBatch, Tensor, list[int]]], model: nn.Module) -> tuple[Tensor, None]:
        batch, last, some = next(inputs)
        return model(batch.tokens, batch.position_ids, None, output_processor=choose.after(last, some)), None

    rows, length = batches[0][0].tokens.shape
    found = run_forward(chunks, groups, forward_step, batches, shape=(rows, length * groups.cp.size()))
    tokens = torch.zeros(len(batches) * rows, dtype=torch.long, device="cuda")
    if groups.is_last_stage:
        tokens.copy_(torch.cat(found))
    # Ranks that disagree by rounding would write different numbers of tokens and wait for each other.
    dist.broadcast(tokens, src=dist.get_world_size() - 1)
    return tokens[: len(texts)].tolist()


def _microbatches(
    texts: Sequence[Sequence[int]], keys: Sequence[int], options: Decoding, groups: Groups
) -> list[tuple[KDBatch, Tensor, list[int]]]:
    """Texts as microbatches of one shape, this rank's part of each, with the position [b] of the last token of each
    text and the key of the token after it. Padding follows the text, where causal attention does not reach it."""
    step = options.length_multiple * _LENGTH_STEP
    length = min(-(-max(map(len, texts)) // step) * step, options.longest)
    rows = min(options.rows, len(texts))
    padded = [*zip(texts, keys, strict=True), *repeat((texts[0], keys[0]), -len(texts) % rows)]
    batches = []
    for start in range(0, len(padded), rows):
        some = padded[start : start + rows]
        tokens = torch.tensor([[*text, *repeat(0, length - len(text))] for text, _ in some])
        batch = KDBatch.of_tokens(tokens, torch.arange(length).expand(rows, length).contiguous(), None)
        last = torch.tensor([len(text) - 1 for text, _ in some], device="cuda")
        batches.append((batch.on_rank(groups.cp), last, [position_key(key, len(text)) for text, key in some]))
    return batches
