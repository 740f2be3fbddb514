"""Sampled tokens and label logits on vocabulary shards equal those of one rank."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mkd.losses import LinearLogits, VocabLayout
from mkd.losses.measure.sampling import SampledTokens, label_logits, sample_teacher_tokens
from mkd.teacher.cache.sampling import stratified_uniforms
from tests.dist.test_losses import shard_rows
from tests.support.dist.pool import Pool
from tests.support.tolerance import FP32, assert_close_norm

ROWS, WIDTH, DRAWS, TEMPERATURE = 33, 6, 7, 1.5


def make(vocab: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an LM head whose padding would be the maximum, and labels."""
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = torch.randn(ROWS, WIDTH, generator=generator), torch.full((padded, WIDTH), 90.0)
    weight[:vocab] = torch.randn(vocab, WIDTH, generator=generator)
    labels = torch.randint(0, vocab, (ROWS,), generator=generator)
    labels[3] = -100
    return hidden, weight, labels


def run_case(rank: int, ranks: int, vocab: int, padded: int) -> tuple[SampledTokens, Tensor]:
    hidden, weight, labels = make(vocab, padded)
    layout = VocabLayout(vocab, torch.distributed.group.WORLD)
    model, numbers = (
        LinearLogits(hidden, shard_rows(weight, rank, ranks)),
        stratified_uniforms(b"0123456789abcdef", ROWS, DRAWS),
    )
    how = dict(temperatures=(1.0, TEMPERATURE), vocab=layout, chunk_rows=10)
    return sample_teacher_tokens(model, numbers, TEMPERATURE, **how), label_logits(model, labels, vocab=layout)


@pytest.mark.parametrize(("ranks", "vocab", "padded"), [(1, 23, 23), (2, 23, 32), (4, 23, 64)])
def test_shards(gloo_pool: Callable[[int], Pool], ranks: int, vocab: int, padded: int) -> None:
    """64 over 4 ranks leaves two shards without a token."""
    hidden, weight, labels = make(vocab, padded)
    logits = hidden.double() @ weight[:vocab].double().t()
    ends = torch.softmax(logits / TEMPERATURE, dim=1).cumsum(1)
    ids = (stratified_uniforms(b"0123456789abcdef", ROWS, DRAWS)[:, :, None] >= ends[:, None]).sum(2)
    own = torch.where(labels < 0, 0, logits.gather(1, labels.clamp_min(0)[:, None])[:, 0])
    assert len(ids.unique()) > vocab / 2
    for draws, label in gloo_pool(ranks).run(run_case, vocab, padded):
        assert torch.equal(draws.ids.long(), ids)
        for lse, t in zip(draws.lse, (1.0, TEMPERATURE), strict=True):
            assert_close_norm(lse, torch.logsumexp(logits / t, 1), FP32, f"lse at {t}")
        assert_close_norm(label, own, FP32, "label")
