"""Texts that the student writes: greedy decoding in the layout in which it trains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.losses import LogitMap
from mkd.models.gpt import output_head

_LENGTH_STEP = 16
"""Rows are padded to a multiple of this number of tokens, so that few shapes occur; FP8 needs it too."""


@dataclass(frozen=True)
class Decoding:
    """Options of `write_greedy`."""

    tokens: int
    """Tokens that are written per prompt at most."""
    end_tokens: frozenset[int]
    """Each of them ends a text and is its last token."""
    true_vocab: int
    """Tokens that exist; ids from here up are never written."""
    rows: int
    """Prompts per microbatch; bounds the memory together with `longest`."""
    longest: int
    """Length of a row at most: no prompt has more tokens without those that are written."""
    length_multiple: int = 1
    """Divisor of every row length that the layout needs."""


def write_greedy(
    chunks: Sequence[nn.Module], groups: Groups, prompts: Sequence[Sequence[int]], options: Decoding
) -> list[list[int]]:
    """Continue each prompt with the most probable token after it, again and again. Collective over all ranks.

    The whole text is read again for each token; nothing is cached. All data-parallel ranks compute the same texts,
    since they may share experts. No random number is used, and the modes of the model chunks are restored.

    Args:
        chunks: the student's model chunks on this rank.
        groups: its layout.
        prompts: token ids, the same on all ranks; none may be empty.
        options: see `Decoding`.

    Returns:
        The tokens that were written after each prompt, the same on all ranks.
    """
    texts, written = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    with _evaluating(chunks), torch.no_grad():
        for _ in range(options.tokens):
            following = _next_tokens(chunks, groups, texts, options)
            for text, new, token in zip(texts, written, following, strict=True):
                if not new or new[-1] not in options.end_tokens:
                    text.append(token)
                    new.append(token)
            if all(new[-1] in options.end_tokens for new in written):
                break
    return written


@contextmanager
def _evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Without dropout, and without Megatron's timers, as in an evaluation."""
    modes = [chunk.training for chunk in chunks]
    config = get_model_config(chunks[0])
    timers, config.timers = config.timers, None
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        config.timers = timers
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)


def _next_tokens(
    chunks: Sequence[nn.Module], groups: Groups, texts: Sequence[Sequence[int]], options: Decoding
) -> list[int]:
    """The most probable token after each text, the same on all ranks."""
    batches = _microbatches(texts, options, groups)
    vp = len(chunks) if len(chunks) > 1 else None
    config = get_model_config(chunks[0])
    count = len(batches)
    if vp is not None:  # virtual stages compute whole groups of microbatches
        group = config.microbatch_group_size_per_vp_stage or groups.pp.size()
        batches += batches[-1:] * (-count % group)
    choose = NextToken(groups, options.true_vocab)

    def forward_step(inputs: Iterator[tuple[KDBatch, Tensor]], model: nn.Module) -> tuple[Tensor, None]:
        batch, last = next(inputs)
        return model(batch.tokens, batch.position_ids, None, output_processor=choose.after(last)), None

    rows, length = batches[0][0].tokens.shape
    found = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=vp)(
        forward_step_func=forward_step,
        data_iterator=iter(batches) if vp is None else [iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=length * groups.cp.size(),
        micro_batch_size=rows,
        forward_only=True,
    )
    tokens = torch.zeros(count * rows, dtype=torch.long, device="cuda")
    if groups.is_last_stage:
        tokens.copy_(torch.cat(found[:count]))
    # Ranks that disagree by rounding would write different numbers of tokens and wait for each other.
    dist.broadcast(tokens, src=dist.get_world_size() - 1)
    return tokens[: len(texts)].tolist()


def _microbatches(texts: Sequence[Sequence[int]], options: Decoding, groups: Groups) -> list[tuple[KDBatch, Tensor]]:
    """Texts as microbatches of one shape, this rank's part of each, with the position [b] of the last token of each
    text. Padding follows the text, where causal attention does not reach it."""
    step = options.length_multiple * _LENGTH_STEP
    length = min(-(-max(map(len, texts)) // step) * step, options.longest)
    rows = min(options.rows, len(texts))
    padded = [*texts, *repeat(texts[0], -len(texts) % rows)]
    batches = []
    for start in range(0, len(padded), rows):
        some = padded[start : start + rows]
        tokens = torch.tensor([[*text, *repeat(0, length - len(text))] for text in some])
        batch = KDBatch.of_tokens(tokens, torch.arange(length).expand(rows, length).contiguous(), None)
        last = torch.tensor([len(text) - 1 for text in some], device="cuda")
        batches.append((batch.on_rank(groups.cp), last))
    return batches


@dataclass(frozen=True)
class NextToken:
    """Chooses the most probable token after each row of a microbatch, on the last pipeline stage."""

    groups: Groups
    true_vocab: int

    def after(self, last: Tensor) -> Callable[..., Tensor]:
        """An output processor of a GPTModel that returns [b] int64: the token after position `last` [b] of each row."""

        def choose(
            *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, config: Any, **unused: Any
        ) -> Tensor:
            weight, scale = output_head(output_layer, output_weight, config)
            hidden = self._hidden_at(hidden_states, last, config.sequence_parallel)
            return self._most_probable(LogitMap(*scale).apply_((hidden @ weight.t()).float()))

        return choose

    def _hidden_at(self, hidden: Tensor, last: Tensor, sequence_parallel: bool) -> Tensor:
        """[b, H] final hidden states at position `last` of each row, from the rank that has it."""
        tp, cp = self.groups.tp, self.groups.cp
        parts = tp.size() if sequence_parallel else 1
        length = hidden.shape[0] * parts * cp.size()
        own = dual_chunk_positions((0, length), cp.rank(), cp.size())
        own = own.chunk(parts)[tp.rank() if sequence_parallel else 0].to(hidden.device)
        is_here = own[:, None] == last[None, :]
        found = hidden[is_here.int().argmax(dim=0), torch.arange(len(last), device=hidden.device)].float()
        found = torch.where(is_here.any(dim=0)[:, None], found, 0.0)
        for group, is_split in ((tp, sequence_parallel), (cp, True)):
            if is_split and group.size() > 1:
                dist.all_reduce(found, group=group)  # one rank adds a value, the others 0
        return found.to(hidden.dtype)

    def _most_probable(self, logits: Tensor) -> Tensor:
        """[b] the token with the largest logit over all vocabulary shards, the first one if there are several."""
        tp = self.groups.tp
        first = tp.rank() * logits.shape[1]
        logits[:, max(self.true_vocab - first, 0) :] = -torch.inf
        best, token = logits.max(dim=1)
        candidates = torch.stack((best.double(), (token + first).double()))
        everywhere = [torch.empty_like(candidates) for _ in range(tp.size())]
        dist.all_gather(everywhere, candidates, group=tp)
        values, tokens = torch.stack(everywhere, dim=1)
        tokens = torch.where(values == values.max(dim=0).values, tokens, torch.inf)
        return tokens.min(dim=0).values.long()
