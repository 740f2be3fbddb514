"""Sizes of cached rollouts, and modules after a failure."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from mkd.rollout.engine import attention
from mkd.rollout.engine.cached import _Burst, _Sizes, _Text
from mkd.rollout.interface import Decoding, Request


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("texts", [1, 3, 5, 8, 40])
def test_slots_stay_within_the_memory(multiple: int, stages: int, texts: int) -> None:
    """`texts` texts of 64 tokens fit, and never fewer than `multiple` are computed; no slot is empty for long."""
    groups = SimpleNamespace(dp=SimpleNamespace(size=lambda: 2), pp=SimpleNamespace(size=lambda: stages))
    options = Decoding(
        tokens=48, end_tokens=frozenset(), true_vocab=9, rows=1, longest=64, length_multiple=multiple,
        cache_tokens=texts * 64,
    )  # fmt: skip
    for requests in (1, 9, 60):
        sizes = _Sizes.of(groups, [Request(tuple(range(16)))] * requests, options)
        assert sizes.slots % multiple == 0 < sizes.slots and 0 < sizes.microbatches <= stages
        assert sizes.length == 64
        assert sizes.slots * sizes.microbatches <= max(texts, multiple)
        if texts >= 2 * multiple * stages and requests == 60:
            assert sizes.slots * sizes.microbatches >= min(texts // 2, 30), "the memory is used"


def test_tokens_behind_the_end_of_a_text_are_discarded() -> None:
    options = Decoding(tokens=5, end_tokens=frozenset({2}), true_vocab=9, rows=1, longest=64)
    texts = [_Text(Request((1,)), number) for number in range(4)]
    first = torch.tensor([[[3, 3, 2, 3]], [[4, 2, 4, 4]]])  # [passes, parts, R]
    second = torch.tensor([[[5, 5, 5, 2]], [[6, 6, 6, 6]], [[7, 7, 7, 7]], [[8, 8, 8, 8]]])
    both = [_Burst.of([[*texts, None]], torch.nn.functional.pad(tokens, (0, 1))) for tokens in (first, second)]
    assert [[text.number for text in burst.record(options)] for burst in both] == [[1, 2], [0, 3]]
    assert [text.written for text in texts] == [[3, 4, 5, 6, 7], [3, 2], [2], [3, 4, 2]]


def test_modules_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core attention whose options are unknown leaves the rotary embedding as it was."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention = torch.nn.Identity()

    rope, layer = RotaryEmbedding(kv_channels=4, rotary_percent=1.0, use_cpu_initialization=True), Layer()
    monkeypatch.setattr(attention, "Attention", Layer)
    with pytest.raises(AttributeError), attention.cached_attention([torch.nn.ModuleList([rope, layer])], 16):
        pass
    assert "forward" not in vars(rope) and "forward" not in vars(layer.core_attention)
