"""Log-probabilities that the student gives a text, computed on the training ranks with the training weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups
from mkd.rollout.engine.forward import evaluating, positions_on_rank, run_forward, sum_of_parts
from mkd.rollout.engine.sampler import logits_of
from mkd.rollout.interface import Decoding

_LENGTH_STEP = 16
"""The row is padded to a multiple of this number of tokens, which FP8 needs."""


def own_scores(chunks: Sequence[nn.Module], groups: Groups, text: Sequence[int], options: Decoding) -> np.ndarray:
    """[n - 1] fp64 log-probability of each of n tokens but the first, at temperature 1. The same on all ranks.

    Collective over all ranks. No state of a random number generator is used or changed.

    Args:
        chunks: the student's model chunks on this rank.
        groups: its layout.
        text: at least two token ids, no more than `Decoding.longest`.
        options: vocabulary and row lengths.
    """
    step = options.length_multiple * _LENGTH_STEP
    length = min(-(-len(text) // step) * step, options.longest)
    tokens = torch.tensor([[*text, *[0] * (length - len(text))]])
    batch = KDBatch.of_tokens(tokens, torch.arange(length)[None], None).on_rank(groups.cp)
    scorer = _Scorer(groups, torch.tensor(text[1:], device="cuda"), options.true_vocab)

    def forward_step(inputs: Iterator[KDBatch], model: nn.Module) -> tuple[Tensor, None]:
        one = next(inputs)
        return model(one.tokens, one.position_ids, None, output_processor=scorer), None

    with evaluating(chunks):
        found = run_forward(chunks, groups, forward_step, [batch], shape=(1, length))
    scores = torch.zeros(len(text) - 1, device="cuda")
    if groups.is_last_stage:
        scores.copy_(found[0])
    dist.broadcast(scores, src=dist.get_world_size() - 1)
    return scores.double().cpu().numpy()


class _Scorer:
    """An output processor of a GPTModel that returns [n] fp32: the log-probability of each label."""

    def __init__(self, groups: Groups, labels: Tensor, true_vocab: int) -> None:
        self._groups, self._labels, self._true_vocab = groups, labels, true_vocab

    def __call__(
        self, *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, config: Any, **_: Any
    ) -> Tensor:
        hidden = self._whole(hidden_states[:, 0], config.sequence_parallel)[: len(self._labels)]
        logits = logits_of(hidden, output_layer, output_weight, config)
        tp = self._groups.tp
        first = tp.rank() * logits.shape[1]
        logits[:, max(self._true_vocab - first, 0) :] = -torch.inf
        largest = self._reduced(logits.max(dim=1).values, dist.ReduceOp.MAX)
        total = self._reduced((logits - largest[:, None]).exp().sum(dim=1), dist.ReduceOp.SUM)
        place = (self._labels - first).clamp(0, logits.shape[1] - 1)
        is_here = self._labels == place + first
        own = logits.gather(1, place[:, None])[:, 0]
        return self._reduced(torch.where(is_here, own, 0.0), dist.ReduceOp.SUM) - largest - total.log()

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        if self._groups.tp.size() > 1:
            dist.all_reduce(value, op=operation, group=self._groups.tp)
        return value

    def _whole(self, hidden: Tensor, sequence_parallel: bool) -> Tensor:
        """[length, H] final hidden states of the row, of which [length / (cp tp), H] may be on this rank."""
        own = positions_on_rank(hidden, self._groups, sequence_parallel)
        ranks = self._groups.cp.size() * (self._groups.tp.size() if sequence_parallel else 1)
        whole = torch.zeros(ranks * len(hidden), hidden.shape[1], device=hidden.device)
        whole[own] = hidden.float()
        return sum_of_parts(whole, self._groups, sequence_parallel).to(hidden.dtype)
