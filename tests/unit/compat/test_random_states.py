"""mkd/compat/random_states.py: a model without dropout does not switch random states."""

from contextlib import nullcontext

import pytest
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import nn

from mkd.compat.random_states import without_dropout_states


class Attention(nn.Module):
    """Transformer Engine's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout_ctx = get_cuda_rng_tracker().fork


def test_no_switch_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = []
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self: forks.append(self) or nullcontext())
    model = nn.Sequential(Attention(), nn.Identity())
    original = model[0].attention_dropout_ctx
    with without_dropout_states(model):
        with get_cuda_rng_tracker().fork(), model[0].attention_dropout_ctx():
            pass
        assert not forks
    assert model[0].attention_dropout_ctx == original
    with get_cuda_rng_tracker().fork(), model[0].attention_dropout_ctx():
        assert len(forks) == 2
