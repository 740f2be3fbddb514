"""Choice of the next token: the most probable one, or one sampled with random numbers that depend on no layout.

A sample is the argmax over the vocabulary of logit / T + g, where g are independent Gumbel variables (the Gumbel-max
trick). Here g is a hash of seed, prompt, sample index, position and token id: every tensor-parallel rank computes the
numbers of its own vocabulary shard, and neither the number of ranks nor the other prompts nor a resumed job changes
them.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.distributed.groups import Groups
from mkd.losses import LogitMap
from mkd.models.gpt import output_head
from mkd.rollout.engine.forward import positions_on_rank, sum_of_parts
from mkd.rollout.interface import Decoding, Request

_BITS = 64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea and Flood 2014)."""


def request_key(request: Request, seed: int) -> int:
    """64-bit key of all random numbers of a request."""
    head = struct.pack("<qqq", seed, request.sample, len(request.prompt))
    ids = struct.pack(f"<{len(request.prompt)}q", *request.prompt)
    return int.from_bytes(hashlib.blake2b(head + ids, digest_size=_BITS // 8).digest(), "little")


def position_key(key: int, position: int) -> int:
    """Key of the token at a position of a text, as a signed 64-bit integer."""
    return signed(key + (position + 1) * _GOLDEN)


def next_position_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """[b] int64 keys of the tokens after `positions`, which are `position_key` of `positions` + 1; int64 sums wrap."""
    return keys + (positions + 2) * signed(_GOLDEN)


def gumbel_noise(keys: Tensor, first: int, count: int) -> Tensor:
    """[b, count] fp64 Gumbel variables of the token ids `first`, `first` + 1, ...

    Args:
        keys: [b] int64, see `position_key`.
        first: the first id.
        count: number of ids.
    """
    ids = torch.arange(first + 1, first + count + 1, device=keys.device)
    bits = _mix(_mix(keys)[:, None] + ids * signed(_GOLDEN))
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # exact, and neither 0 nor 1
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64; int64 products wrap around."""
    x = (x ^ _shift(x, 30)) * signed(_FIRST)
    x = (x ^ _shift(x, 27)) * signed(_SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (_BITS - bits)) - 1)


def signed(value: int) -> int:
    """The 64 bits of an integer as a signed one."""
    value &= (1 << _BITS) - 1
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def logits_of(
    hidden: Tensor, output_layer: nn.Module, output_weight: Tensor | None, config: Any, in_fp32: bool = True
) -> Tensor:
    """[b, V/tp] logits of hidden states [b, H], for the arguments of an output processor.

    They are in fp32, with `in_fp32=False` in the dtype of the products if these are the logits.
    """
    weight, scale = output_head(output_layer, output_weight, config)
    products, logit_map = hidden @ weight.t(), LogitMap(*scale)
    if not in_fp32 and logit_map == LogitMap():
        return products
    return logit_map.apply_(products.float())


@dataclass(frozen=True)
class NextToken:
    """Chooses the token after each row of a microbatch, on the last pipeline stage."""

    groups: Groups
    true_vocab: int
    temperature: float = 0.0
    """0 chooses the most probable token."""
    top_p: float = 1.0
    """See `Decoding.top_p`."""

    @classmethod
    def of(cls, groups: Groups, options: Decoding) -> "NextToken":
        """The choice that the options describe."""
        return cls(groups, options.true_vocab, options.temperature, options.top_p)

    def after(self, last: Tensor, keys: Sequence[int] = ()) -> Callable[..., Tensor]:
        """An output processor of a GPTModel that returns [b] int64: the token after each row.

        Args:
            last: [b] position of the last token of each row.
            keys: `position_key` of each row's next token; unused at temperature 0.
        """

        def choose(
            *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, config: Any, **unused: Any
        ) -> Tensor:
            hidden = self._hidden_at(hidden_states, last, config.sequence_parallel)
            own = torch.tensor(keys, device=hidden.device) if self.temperature > 0.0 else None
            return self._choose(logits_of(hidden, output_layer, output_weight, config), own)

        return choose

    def of_texts(self, keys: Tensor) -> Callable[..., Tensor]:
        """An output processor of a GPTModel that returns [R] int64: the token after each token of a row [1, R], which
        are of different texts.

        Args:
            keys: [R] int64, `position_key` of each text's next token.
        """

        def choose(
            *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, config: Any, **unused: Any
        ) -> Tensor:
            hidden = hidden_states[:, 0]
            if config.sequence_parallel and self.groups.tp.size() > 1:
                whole = hidden.new_empty(len(keys), hidden.shape[1])
                dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.groups.tp)
                hidden = whole
            in_fp32 = not self._has_kernel(hidden)
            return self._choose(logits_of(hidden, output_layer, output_weight, config, in_fp32), keys)

        return choose

    def _hidden_at(self, hidden: Tensor, last: Tensor, sequence_parallel: bool) -> Tensor:
        """[b, H] final hidden states at position `last` of each row, from the rank that has it."""
        own = positions_on_rank(hidden, self.groups, sequence_parallel)
        is_here = own[:, None] == last[None, :]
        found = hidden[is_here.int().argmax(dim=0), torch.arange(len(last), device=hidden.device)].float()
        found = torch.where(is_here.any(dim=0)[:, None], found, 0.0)
        return sum_of_parts(found, self.groups, sequence_parallel).to(hidden.dtype)

    def _choose(self, logits: Tensor, keys: Tensor | None) -> Tensor:
        """[b] the token with the largest score over all vocabulary shards, the first one if there are several."""
        tp = self.groups.tp
        first = tp.rank() * logits.shape[1]
        logits[:, max(self.true_vocab - first, 0) :] = -torch.inf
        best, token = self._best(logits, keys, first)
        if tp.size() == 1:
            return token
        candidates = torch.stack((best.double(), (token + first).double()))
        everywhere = candidates.new_empty(tp.size(), *candidates.shape)
        dist.all_gather_into_tensor(everywhere.flatten(0, 1), candidates, group=tp)
        values, tokens = everywhere.unbind(1)
        tokens = torch.where(values == values.max(dim=0).values, tokens, torch.inf)
        return tokens.min(dim=0).values.long()

    def _has_kernel(self, values: Tensor) -> bool:
        """True if a kernel samples from logits on the device of `values`, in any dtype."""
        return values.is_cuda and self.temperature > 0.0 and self.top_p == 1.0

    def _best(self, logits: Tensor, keys: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
        """[b] the largest score of this vocabulary shard, and its column."""
        if self.temperature == 0.0:
            return logits.max(dim=1)
        if self._has_kernel(logits):
            from mkd.rollout.engine.sampling_kernel import sampled_triton

            return sampled_triton(logits, keys, first, self.temperature)
        scores = logits.double() / self.temperature
        if self.top_p < 1.0:
            scores = self._most_probable(scores)
        return (scores + gumbel_noise(keys, first, logits.shape[1])).max(dim=1)

    def _most_probable(self, logits: Tensor) -> Tensor:
        """[b, V/tp] without the tokens that `top_p` leaves out, which are -inf: the smallest number of most probable
        ones is kept whose probabilities sum to `top_p`, and those that are as probable as the last of them.

        Communication: one all-gather of the logits, none on one rank, where a CUDA graph is captured.
        """
        tp, shards = self.groups.tp, [logits]
        if tp.size() > 1:
            shards = [torch.empty_like(logits) for _ in range(tp.size())]
            dist.all_gather(shards, logits.contiguous(), group=tp)
        ordered = torch.cat(shards, dim=1).sort(dim=1, descending=True).values
        before = (ordered.softmax(dim=1).cumsum(dim=1) < self.top_p).sum(dim=1, keepdim=True)
        least = ordered.gather(1, before.clamp(max=ordered.shape[1] - 1))
        return logits.masked_fill(logits < least, -torch.inf)
