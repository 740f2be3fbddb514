"""Rollouts with cached keys and values: each token costs a forward pass over one token per text.

A microbatch has a fixed number of slots, one per text. A prompt is read into a slot, all but its last token; from then
on each forward pass computes one token of every slot, at the text's own position. When texts have ended, the next
prompts are read into their slots. The host looks at the written tokens of `_BURST` forward passes while the device
computes the next ones; what follows the end of a text is discarded. On a GPU the forward pass is a CUDA graph
where it can be captured (`captured_step`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mkd.distributed.groups import Groups
from mkd.rollout.engine.attention import CachedAttention, KeysAndValues, PromptPass, TokenPass, cached_attention
from mkd.rollout.engine.captured_step import can_capture, captured
from mkd.rollout.engine.forward import run_forward
from mkd.rollout.engine.sampler import NextToken, next_position_keys, request_key, signed
from mkd.rollout.engine.token_layout import TokenLayout
from mkd.rollout.interface import Decoding, Delivery, Request

_STEP = 16
"""Lengths are rounded up to a multiple of it, so that few shapes occur."""
_BURST = 4
"""Forward passes between two looks of the host."""


def write_cached(
    chunks: Sequence[nn.Module],
    groups: Groups,
    requests: Sequence[Request],
    options: Decoding,
    delivery: Delivery | None = None,
) -> list[list[int]]:
    """The tokens written after each prompt, the same on all ranks. Collective over all ranks.

    Each data-parallel rank writes a part of the texts.

    Args:
        chunks: the student's model chunks on this rank, in evaluation mode.
        groups: its layout, without context parallelism.
        requests: the same on all ranks.
        options: see `Decoding`.
        delivery: the use of texts before all are written; None for none.
    """
    replicas = groups.dp.size()
    if delivery is None:
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        parts = [order[rank::replicas] for rank in range(replicas)]
    else:
        parts = delivery.parts(replicas)
    own = [_Text(requests[i], i) for i in parts[groups.dp.rank()]]
    sizes = _Sizes.of(groups, requests, options)
    with cached_attention(chunks, sizes.length) as attention:
        _Writer.of(chunks, groups, options, sizes, attention, delivery).write(own)
    return _gather([text.written for text in own], groups, parts, options)


def cached_length(longest: int, multiple: int) -> int:
    """Tokens of each cache for texts of at most `longest` tokens; `multiple` as `Decoding.length_multiple`."""
    step = multiple * _STEP
    return -(-longest // step) * step


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the texts that are written at the same time, alike on all ranks, which may share experts."""

    slots: int
    """Texts per microbatch, a multiple of `Decoding.length_multiple`: the texts are the tokens of a row."""
    microbatches: int
    """As many as keep all pipeline stages busy."""
    length: int
    """Length of the longest text, rounded up."""

    @classmethod
    def of(cls, groups: Groups, requests: Sequence[Request], options: Decoding) -> "_Sizes":
        """Fit the texts into `Decoding.cache_tokens`, or by default the texts of each microbatch into the tokens of
        `Decoding.rows` rows of `Decoding.longest` tokens."""
        multiple, stages = options.length_multiple, groups.pp.size()
        longest = min(max(len(request.prompt) for request in requests) + options.tokens, options.longest)
        length = cached_length(longest, multiple)
        tokens = options.rows * options.longest * stages if options.cache_tokens is None else options.cache_tokens
        own, most = -(-len(requests) // groups.dp.size()), max(tokens // length, multiple)
        microbatches = min(stages, most // multiple, own)
        slots = min(-(-own // microbatches // multiple), most // microbatches // multiple) * multiple
        return cls(slots, microbatches, length)


@dataclass
class _Text:
    """A prompt and the tokens that are written after it."""

    request: Request
    number: int
    """Index of the request."""
    written: list[int] = field(default_factory=list)
    launched: int = 0
    """Forward passes since it is in a slot, those included whose tokens the host has not seen."""
    is_complete: bool = False

    def left(self, options: Decoding) -> int:
        """Forward passes that it may still need."""
        return 0 if self.is_complete else max(0, options.tokens - self.launched)

    def append(self, new: Sequence[int], options: Decoding) -> None:
        """Append tokens up to the end of the text."""
        new = new[: options.tokens - len(self.written)]
        end = options.first_end(self.written, new)
        self.written.extend(new[:end])
        self.is_complete = end is not None or len(self.written) == options.tokens


@dataclass(frozen=True)
class _Burst:
    """Forward passes whose tokens the host has not seen."""

    texts: list[list[_Text | None]]
    """The texts of each part."""
    tokens: Tensor
    """[passes, parts, R] int64 on the host, as soon as `copied` has completed."""
    copied: torch.cuda.Event

    @classmethod
    def of(cls, texts: list[list[_Text | None]], tokens: Tensor) -> "_Burst":
        """Start the copy of tokens [passes, parts, R] on the device."""
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(texts, host, copied)

    def record(self, options: Decoding) -> list[_Text]:
        """Append the tokens to the texts. Returns the texts that are complete with them."""
        self.copied.synchronize()
        ended = []
        for texts, tokens in zip(self.texts, self.tokens.permute(1, 2, 0).tolist(), strict=True):
            for text, new in zip(texts, tokens, strict=True):
                if text is not None and not text.is_complete:
                    text.append(new, options)
                    ended += [text] * text.is_complete
        return ended


@dataclass
class _Slots:
    """The texts of one microbatch."""

    cache: KeysAndValues
    tokens: Tensor
    """[R] int64 last token of each text."""
    positions: Tensor
    """[R] int64 its position."""
    keys: Tensor
    """[R] int64 `request_key` of each text."""
    texts: list[_Text | None]
    end: int = 1
    """All positions are below it."""

    @classmethod
    def empty(cls, sizes: _Sizes) -> "_Slots":
        """Slots without texts."""
        tokens, positions, keys = torch.zeros(3, sizes.slots, dtype=torch.long, device="cuda")
        cache = KeysAndValues(sizes.slots, sizes.length)
        return cls(cache, tokens, positions, keys, [None] * sizes.slots)

    def left(self, options: Decoding) -> int:
        """Forward passes that the texts may still need."""
        return max((text.left(options) for text in self.texts if text is not None), default=0)

    def take(self, waiting: deque[_Text], seed: int) -> list[tuple[int, _Text]]:
        """Put waiting texts into the slots of those that are complete, if these are an eighth of all; (slot, text)."""
        free = [n for n, text in enumerate(self.texts) if text is None or text.is_complete]
        if 8 * len(free) < len(self.texts):
            return []
        taken = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
        if taken:
            where = torch.tensor([slot for slot, _ in taken], device="cuda")
            values = [(t.request.prompt[-1], len(t.request.prompt) - 1, _key(t.request, seed)) for _, t in taken]
            for state, new in zip((self.tokens, self.positions, self.keys), zip(*values, strict=True), strict=True):
                state[where] = torch.tensor(new, device="cuda")
            self.end = max(self.end, *(len(text.request.prompt) for _, text in taken))
        for slot, text in taken:
            self.texts[slot] = text
        return taken

    def writing(self) -> TokenPass:
        """The forward pass over the last token of each text."""
        return TokenPass(self.cache, self.positions, self.end)

    def advance(self, tokens: Tensor) -> None:
        """Append a token [R] to each text on the device; the positions of texts that are full stay."""
        self.tokens.copy_(tokens)
        self.positions.add_(1).clamp_(max=self.cache.length - 1)


def _key(request: Request, seed: int) -> int:
    return signed(request_key(request, seed))


@dataclass
class _Writer:
    """Writes the texts of this data-parallel rank."""

    chunks: Sequence[nn.Module]
    groups: Groups
    options: Decoding
    sizes: _Sizes
    attention: CachedAttention
    parts: list[_Slots]
    choose: NextToken
    layout: TokenLayout
    delivery: Delivery | None = None
    graph: Callable[[], Tensor] | None = None
    """`_pass` as a CUDA graph; None before the first pass, and where it cannot be captured."""

    @classmethod
    def of(
        cls,
        chunks: Sequence[nn.Module],
        groups: Groups,
        options: Decoding,
        sizes: _Sizes,
        attention: CachedAttention,
        delivery: Delivery | None,
    ) -> "_Writer":
        """A writer with empty slots."""
        parts = [_Slots.empty(sizes) for _ in range(sizes.microbatches)]
        layout = TokenLayout.of(chunks, groups, sizes.slots)
        return cls(chunks, groups, options, sizes, attention, parts, NextToken.of(groups, options), layout, delivery)

    def write(self, texts: Sequence[_Text]) -> None:
        """Write all tokens of the texts."""
        waiting, unseen = deque(texts), deque[_Burst]()
        while True:
            taken = [part.take(waiting, self.options.seed) for part in self.parts]
            prompts = [len(text.request.prompt) - 1 for some in taken for _, text in some]
            left = max(part.left(self.options) for part in self.parts)
            rows, length, passes = self._largest(max(map(len, taken)), max(prompts, default=0), min(left, _BURST))
            if length > 0:
                self._read(taken, rows, length)
            if passes > 0:
                unseen.append(self._launch(passes))
            if len(unseen) > 1 or passes == 0:
                if not unseen:
                    return
                self._see(unseen.popleft())

    def _largest(self, *values: int) -> tuple[int, ...]:
        """The largest values of the data-parallel ranks, which may call experts in common: in expert parallelism, or
        in more expert-tensor-parallel ranks than tensor-parallel ones."""
        if not get_model_config(self.chunks[0]).num_moe_experts:
            return values
        found = torch.tensor(values, device="cuda")
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.groups.dp)
        return tuple(found.tolist())

    def _read(self, taken: Sequence[Sequence[tuple[int, _Text]]], rows: int, length: int) -> None:
        """Store keys and values of the prompts that each part has taken, at most `rows`, without the last token."""
        length = min(_rounded(length, self.options.length_multiple * _STEP), self.sizes.length)
        most = max(1, self.options.rows * self.options.longest // length)
        rows = min(1 << (rows - 1).bit_length(), most)
        inputs = []
        for start in range(0, max(map(len, taken)), rows):
            for part, some in zip(self.parts, taken, strict=True):
                inputs.append((part, some[start : start + rows]))
        missing = self._largest(len(inputs))[0] - len(inputs)
        inputs += [(self.parts[0], [])] * missing

        def forward_step(
            batches: Iterator[tuple[_Slots, list[tuple[int, _Text]]]], model: nn.Module
        ) -> tuple[Tensor, None]:
            part, some = next(batches)
            tokens = torch.zeros(rows, length, dtype=torch.long)
            for row, (_, text) in enumerate(some):
                prompt = text.request.prompt[:-1]
                tokens[row, : len(prompt)] = torch.tensor(prompt)
            slots = torch.tensor([slot for slot, _ in some], dtype=torch.long, device="cuda")
            self.attention.now = PromptPass(part.cache, slots)
            positions = torch.arange(length, device="cuda").clamp(max=self.options.longest - 1)
            positions = positions.expand(rows, length).contiguous()
            return model(tokens.cuda(), positions, None, output_processor=_nothing), None

        self._forward(forward_step, inputs, (rows, length))

    def _launch(self, passes: int) -> _Burst:
        """Write this number of tokens of every text."""
        found = []
        for _ in range(passes):
            found.append((self.graph or self._pass)().clone())
            if self.graph is None and can_capture(self.chunks, self.groups):
                self.graph = captured(self._pass)
        for text in (text for part in self.parts for text in part.texts if text is not None):
            text.launched += passes
        return _Burst.of([list(part.texts) for part in self.parts], torch.stack(found))

    def _see(self, burst: _Burst) -> None:
        for text in burst.record(self.options):
            if self.delivery is not None:
                self.delivery.done(text.number, text.written)

    def _pass(self) -> Tensor:
        """[parts, R] the next token of each text, which is appended on the device."""

        def forward_step(batches: Iterator[_Slots], model: nn.Module) -> tuple[Tensor, None]:
            part = next(batches)
            self.attention.now = part.writing()
            processor = self.choose.of_texts(next_position_keys(part.keys, part.positions))
            positions = part.positions.clamp(max=self.options.longest - 1)
            return model(part.tokens[None], positions[None], None, output_processor=processor), None

        tokens = torch.zeros(len(self.parts), self.sizes.slots, dtype=torch.long, device="cuda")
        with self.layout.active():
            found = self._forward(forward_step, self.parts, (1, self.sizes.slots))
        if self.groups.is_last_stage:
            tokens.copy_(torch.stack(found))
        mp = self.groups.mp
        if self.groups.pp.size() > 1:  # tensor-parallel ranks choose from the same candidates
            dist.broadcast(tokens, group=mp, group_src=mp.size() - 1)
        for part, new in zip(self.parts, tokens, strict=True):
            part.advance(new)
            part.end = min(part.end + 1, part.cache.length)
        return tokens

    def _forward(
        self,
        forward_step: Callable[[Iterator, nn.Module], tuple[Tensor, None]],
        inputs: Sequence,
        shape: tuple[int, int],
    ) -> list[Tensor]:
        """See `run_forward`; without pipeline stages there is nothing to schedule."""
        if self.groups.pp.size() > 1:
            return run_forward(self.chunks, self.groups, forward_step, list(inputs), shape)
        batches = iter(inputs)
        return [forward_step(batches, self.chunks[0])[0] for _ in inputs]


def _nothing(*, hidden_states: Tensor, **unused: object) -> Tensor:
    """An output processor for forward passes whose output is not used."""
    return hidden_states.new_zeros(())


def _rounded(length: int, step: int) -> int:
    """The length rounded up to a multiple of `step` with three significant bits, so that few shapes occur."""
    coarse = step * max(1, 1 << max((length // step).bit_length() - 3, 0))
    return -(-length // coarse) * coarse


def _gather(
    found: Sequence[Sequence[int]], groups: Groups, parts: Sequence[Sequence[int]], options: Decoding
) -> list[list[int]]:
    """The texts of all replicas, in the order of the requests.

    Args:
        found: the texts of this replica.
        groups: the student's layout.
        parts: indices of the requests of each replica.
        options: see `Decoding`.
    """
    own = torch.full((max(map(len, parts)), options.tokens + 1), -1)
    for number, new in enumerate(found):
        own[number, : len(new)] = torch.tensor(new, dtype=torch.long)
    own = own.cuda()
    every = [torch.empty_like(own) for _ in parts]
    dist.all_gather(every, own, group=groups.dp)
    texts: list[list[int]] = [[] for part in parts for _ in part]
    for part, rows in zip(parts, every, strict=True):
        for request, row in zip(part, rows.tolist(), strict=False):
            texts[request] = row[: row.index(-1)]
    return texts
