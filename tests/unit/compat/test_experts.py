"""mkd/compat/experts.py, and that megatron-core 0.19 still needs it. The loss: tests/dist/test_context_parallel.py."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import router

from mkd.compat.experts import balance_experts_over_unequal_ranks
from tests.support.upstream import fresh


def test_padding_does_not_change_the_expert_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = fresh(router)
    names = ("get_tokens_per_expert_and_token_count", "_apply_expert_bias")
    monkeypatch.setattr(router, names[0], getattr(upstream, names[0]))
    monkeypatch.setattr(router.TopKRouter, names[1], getattr(upstream.TopKRouter, names[1]))
    choices = torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    padding = torch.tensor([False, False, True])

    def counted() -> list[float]:
        module = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
        router.TopKRouter._apply_expert_bias(module, choices, padding)
        return module.local_tokens_per_expert.tolist()

    with pytest.raises(RuntimeError, match="must match"):
        counted()
    balance_experts_over_unequal_ranks()
    assert counted() == [1.0, 1.0]
