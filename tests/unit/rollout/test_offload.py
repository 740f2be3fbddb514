"""Optimizer state on the host while texts are written. Megatron's optimizers: tests/dist/test_rollout_offload.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mkd.rollout import offload
from mkd.rollout.offload import StateOffload


class Model(nn.Module):
    """An fp32 and a bf16 parameter; the second has a main parameter in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.whole = nn.Parameter(torch.randn(7, 9, generator=generator))
        self.low = nn.Parameter(torch.randn(5, 11, generator=generator).bfloat16())
        self.frozen = nn.Parameter(torch.randn(3, generator=generator), requires_grad=False)


def trained(steps: int = 2) -> tuple[Model, SimpleNamespace, Tensor]:
    """A model, its optimizer with two levels of others in it as in Megatron, and the main parameter."""
    model = Model()
    main = model.low.detach().float()
    inner = [torch.optim.AdamW([model.whole]), torch.optim.AdamW([main])]
    for _ in range(steps):
        for one in inner:
            for parameter in one.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter) * 0.3
            one.step()
            one.zero_grad()
    first, second = (SimpleNamespace(optimizer=one) for one in inner)
    nothing = SimpleNamespace(optimizer=None, is_stub_optimizer=True)
    chained = SimpleNamespace(chained_optimizers=[first, SimpleNamespace(chained_optimizers=[second, nothing])])
    return model, chained, main


def moments(optimizer: SimpleNamespace) -> list[Tensor]:
    first, second = optimizer.chained_optimizers[0], optimizer.chained_optimizers[1].chained_optimizers[0]
    states = [state for one in (first, second) for state in one.optimizer.state.values()]
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def bits(tensors: list[Tensor]) -> list[bytes]:
    """Their bytes, read from copies: a storage that NumPy has seen cannot be resized."""
    return [tensor.detach().clone().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("piece", [512, 1 << 28])
def test_the_state_leaves_and_returns_bit_for_bit(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Also where a storage lies in several host buffers."""
    monkeypatch.setattr(offload, "_PIECE", piece)
    model, optimizer, main = trained()
    whole = StateOffload(optimizer, [model])
    state, kept = [*moments(optimizer), main], list(model.parameters())
    view = main.view(-1)[3:]  # of the same storage
    before, of_model = bits(state), bits(kept)
    for _ in range(2):
        with whole.away():
            assert [tensor.untyped_storage().nbytes() for tensor in state] == [0] * 5
            assert bits(kept) == of_model
        whole.arrive()
        assert bits(state) == before and torch.equal(view, main.view(-1)[3:])
    assert sum(map(len, whole._host.buffers)) < 4096 if piece == 512 else len(whole._host.buffers) == 1


def test_the_state_returns_after_an_error() -> None:
    model, optimizer, main = trained()
    before = bits([*moments(optimizer), main])
    with pytest.raises(ValueError, match="of a writer"), StateOffload(optimizer, [model]).away():
        raise ValueError("of a writer")
    assert bits([*moments(optimizer), main]) == before


def test_moments_that_do_not_exist_yet_are_left_out() -> None:
    model, optimizer, main = trained(steps=0)
    whole = StateOffload(optimizer, [model])
    assert [storage.data_ptr() for storage in whole.storages()] == [main.data_ptr()]
    with whole.away():
        assert main.untyped_storage().nbytes() == 0


def test_gradients_and_buffers_of_the_model_stay() -> None:
    """A main parameter that is a part of Megatron's parameter buffer, as in the fp32 distributed optimizer."""
    model, optimizer, main = trained()
    buffer = torch.cat([model.whole.detach().flatten(), torch.zeros(4)])
    model.whole.data = buffer[:63].view(7, 9)
    model.whole.main_grad = torch.ones(63)
    group = optimizer.chained_optimizers[0].optimizer.param_groups[0]
    group["params"] = [buffer[10:20], model.whole.main_grad[:5]]
    found = {storage.data_ptr() for storage in StateOffload(optimizer, [model]).storages()}
    assert buffer.data_ptr() not in found and model.whole.main_grad.data_ptr() not in found
    assert main.data_ptr() in found
