"""Rollouts with cached keys and values: each token costs a forward pass over one token per row.

All rows of a microbatch are at the same position. The first pass reads them up to the end of the shortest prompt; in
the others, a row whose prompt is longer takes its next token from the prompt. Rows are sorted by length, so few do.
Tokens after the position of a row, such as those that fill up sequence parallelism, are stored in the cache too; no
query attends to them before they are replaced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.distributed.groups import Groups
from mkd.rollout.attention import KeysAndValues, causal_to_the_last_key
from mkd.rollout.forward import run_forward
from mkd.rollout.interface import Decoding, Request
from mkd.rollout.sampler import NextToken, position_key, request_key

_STEP = 16
"""Lengths are rounded up to a multiple of it, so that few shapes occur."""


def write_cached(
    chunks: Sequence[nn.Module], groups: Groups, requests: Sequence[Request], options: Decoding
) -> list[list[int]]:
    """The tokens written after each prompt, the same on all ranks. Collective over all ranks.

    Each data-parallel rank writes a part of the texts.

    Args:
        chunks: the student's model chunks on this rank, in evaluation mode.
        groups: its layout, without context parallelism.
        requests: the same on all ranks.
        options: see `Decoding`.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    replicas, replica = groups.dp.size(), groups.dp.rank()
    own = [requests[i] for i in order[replica::replicas]]
    own += repeat(requests[order[-1]], -(-len(order) // replicas) - len(own))
    wave = _Wave.sizes(groups, requests, options)
    found: list[list[int]] = []
    with causal_to_the_last_key(chunks):
        for start in range(0, len(own), wave.rows * wave.microbatches):
            found += _write_wave(chunks, groups, own[start : start + wave.rows * wave.microbatches], options, wave)
    return _gather(found, groups, order, options)


def cached_length(longest: int, multiple: int) -> int:
    """Tokens of each cache for texts of at most `longest` tokens; `multiple` as `Decoding.length_multiple`."""
    step = multiple * _STEP
    return -(-longest // step) * step


@dataclass(frozen=True)
class _Wave:
    """Sizes of the texts that are written at the same time, alike on all ranks, which may share experts."""

    rows: int
    """Texts per microbatch."""
    microbatches: int
    """As many as keep all pipeline stages busy."""
    length: int
    """Length of the longest text, rounded up."""
    multiple: int
    """Divisor of the number of tokens of a forward pass."""

    @classmethod
    def sizes(cls, groups: Groups, requests: Sequence[Request], options: Decoding) -> "_Wave":
        """Fit the texts into `Decoding.cache_tokens`, or by default the texts of each microbatch into the tokens of
        `Decoding.rows` rows of `Decoding.longest` tokens."""
        multiple = options.length_multiple
        longest = min(max(len(request.prompt) for request in requests) + options.tokens, options.longest)
        length = cached_length(longest, multiple)
        each = -(-len(requests) // groups.dp.size())
        if options.cache_tokens is not None:
            texts = max(1, min(options.cache_tokens // length, each))
            microbatches = min(groups.pp.size(), texts)
            return cls(texts // microbatches, microbatches, length, multiple)
        rows = max(1, min(options.rows * options.longest // length, each))
        return cls(rows, min(groups.pp.size(), -(-each // rows)), length, multiple)


@dataclass
class _Rows:
    """The texts of one microbatch."""

    requests: Sequence[Request]
    keys: Sequence[int]
    cache: KeysAndValues
    position: int
    """Position of the last token that the model has read in all rows."""
    written: list[list[int]] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)
    """True for each text that is ended or has as many tokens as it may have."""

    @classmethod
    def of(cls, requests: Sequence[Request], options: Decoding, wave: _Wave) -> "_Rows":
        """Rows of which nothing is written."""
        keys = [request_key(request, options.seed) for request in requests]
        cache = KeysAndValues(len(requests), wave.length)
        shortest = min(len(request.prompt) for request in requests)
        return cls(requests, keys, cache, shortest - 1, [[] for _ in requests], [False] * len(requests))

    def tokens(self, start: int, stop: int) -> list[list[int]]:
        """[b, stop - start] token ids at these positions; 0 after the end of a text."""
        found = []
        for request, new in zip(self.requests, self.written, strict=True):
            text = [*request.prompt[start:stop], *new[max(start - len(request.prompt), 0) :]][: stop - start]
            found.append([*text, *repeat(0, stop - start - len(text))])
        return found

    def next_keys(self) -> list[int]:
        """Key of the token after `position`, for each row."""
        return [position_key(key, self.position + 1) for key in self.keys]

    def add(self, tokens: Sequence[int], options: Decoding) -> None:
        """Append the token after `position` to each text that has been read to its end."""
        self.position += 1
        for number, token in enumerate(tokens):
            new = self.written[number]
            if self.position == len(self.requests[number].prompt) + len(new) and not self.done[number]:
                new.append(token)
                self.done[number] = len(new) == options.tokens or options.ends(new)


def _write_wave(
    chunks: Sequence[nn.Module], groups: Groups, requests: Sequence[Request], options: Decoding, wave: _Wave
) -> list[list[int]]:
    count = len(requests)
    padded = [*requests, *repeat(requests[-1], wave.rows * wave.microbatches - count)]
    parts = [padded[start : start + wave.rows] for start in range(0, len(padded), wave.rows)]
    rows = [_Rows.of(part, options, wave) for part in parts]
    read = -(-_largest(max(part.position for part in rows) + 1, groups) // (wave.multiple)) * wave.multiple
    start = [0] * len(rows)
    while True:
        following = _next_tokens(chunks, groups, rows, start, read, options)
        for part, tokens in zip(rows, following, strict=True):
            if not all(part.done):
                part.add(tokens, options)
        if not _largest(int(not all(all(part.done) for part in rows)), groups):
            break
        start, read = [min(part.position, wave.length - wave.multiple) for part in rows], wave.multiple
    return [new for part in rows for new in part.written][:count]


def _largest(value: int, groups: Groups) -> int:
    """The largest value of the data-parallel ranks, which call experts in common."""
    if groups.collection.ep.size() == 1:
        return value
    found = torch.tensor(value, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=groups.dp)
    return int(found.item())


def _next_tokens(
    chunks: Sequence[nn.Module],
    groups: Groups,
    rows: Sequence[_Rows],
    start: Sequence[int],
    count: int,
    options: Decoding,
) -> list[list[int]]:
    """The token after the position of each text, the same on the ranks of a replica.

    Args:
        chunks: the student's model chunks on this rank.
        groups: its layout.
        rows: one entry per microbatch.
        start: first position that each microbatch reads.
        count: number of tokens that it reads.
        options: see `Decoding`.
    """
    choose = NextToken.of(groups, options)

    def forward_step(inputs: Iterator[tuple[_Rows, int]], model: nn.Module) -> tuple[Tensor, None]:
        part, first = next(inputs)
        part.cache.begin_at(first)
        tokens = torch.tensor(part.tokens(first, first + count), device="cuda")
        positions = torch.arange(first, first + count, device="cuda").clamp(max=options.longest - 1)
        last = torch.full((len(part.requests),), part.position - first, device="cuda")
        processor = choose.after(last, part.next_keys())
        positions = positions.expand_as(tokens).contiguous()
        return model(tokens, positions, None, inference_context=part.cache, output_processor=processor), None

    shape = (len(rows[0].requests), count)
    found = run_forward(chunks, groups, forward_step, list(zip(rows, start, strict=True)), shape)
    tokens = torch.zeros(len(rows), shape[0], dtype=torch.long, device="cuda")
    if groups.is_last_stage:
        tokens.copy_(torch.stack(found))
    # Ranks that disagree by rounding would write different texts.
    dist.broadcast(tokens, group=groups.mp, group_src=groups.mp.size() - 1)
    return tokens.tolist()


def _gather(found: Sequence[Sequence[int]], groups: Groups, order: Sequence[int], options: Decoding) -> list[list[int]]:
    """The texts of all replicas, in the order of the requests."""
    replicas = groups.dp.size()
    own = torch.full((len(found), options.tokens + 1), -1, device="cuda")
    for number, new in enumerate(found):
        own[number, : len(new)] = torch.tensor(new, device="cuda")
    every = [torch.empty_like(own) for _ in range(replicas)]
    dist.all_gather(every, own, group=groups.dp)
    texts: list[list[int]] = [[] for _ in order]
    for place, request in enumerate(order):
        row = every[place % replicas][place // replicas].tolist()
        texts[request] = row[: row.index(-1)]
    return texts
