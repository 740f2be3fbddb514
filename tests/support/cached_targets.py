"""Random targets of a teacher, for tests of caches."""

import numpy as np
import torch
from torch import Tensor

from mkd.data.segments import segment_hash
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.record_format import TokenTargets


def make_logits(tokens: int, vocab: int, seed: int = 0) -> Tensor:
    """[tokens, vocab] fp32, from nearly uniform to very peaked, with offsets of up to 100."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = 6 * torch.rand(tokens, 1, generator=generator)
    level = 200 * torch.rand(tokens, 1, generator=generator) - 100
    return torch.randn(tokens, vocab, generator=generator) * sharpness + level


def targets_of(logits: Tensor, labels: Tensor, top_k: int, temperatures: tuple[float, ...] = (1.0,)) -> TokenTargets:
    """Top-k of full logits [n, V] and log-probability of the labels [n]."""
    top, ids = logits.topk(top_k)
    lse = torch.stack([(logits.double() / t).logsumexp(-1) for t in temperatures], dim=-1)
    label = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return TokenTargets(ids.int().numpy(), top.numpy(), lse.float().numpy(), label.float().numpy())


def some_segment(
    seed: int, vocab: int, top_k: int, temperatures: tuple[float, ...] = (1.0,)
) -> tuple[bytes, TokenTargets]:
    """Key and targets of a segment of 1 to 40 tokens, a function of the arguments only."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 41, (1,), generator=generator))
    tokens = torch.randint(0, vocab, (length + 1,), generator=generator)
    return segment_hash(tokens[:-1]), targets_of(make_logits(length, vocab, seed), tokens[1:], top_k, temperatures)


def meta_of(**changes: object) -> CacheMeta:
    """Metadata of a small cache."""
    values = {"teacher": "t" * 32, "tokenizer": "k" * 32, "true_vocab": 307, "top_k": 8, "values": "fp32"}
    return CacheMeta(**values | changes)


def equal_targets(one: TokenTargets, other: TokenTargets) -> bool:
    """True if all values are equal to the last bit."""
    names = ("ids", "logits", "lse", "label_log_prob")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
