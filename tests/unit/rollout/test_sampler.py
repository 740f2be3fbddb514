"""Random numbers of sampled tokens: their distribution, and what they depend on."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mkd.rollout.engine.sampler import NextToken, gumbel_noise, position_key, request_key
from mkd.rollout.interface import Request


def keys(count: int, seed: int = 0) -> torch.Tensor:
    """[count] keys of one position each."""
    key = request_key(Request((3, 1, 4)), seed)
    return torch.tensor([position_key(key, position) for position in range(count)])


def test_shards_have_the_numbers_of_the_whole_vocabulary() -> None:
    whole = gumbel_noise(keys(3), 0, 10)
    parts = [gumbel_noise(keys(3), first, 5) for first in (0, 5)]
    assert torch.equal(whole, torch.cat(parts, dim=1))
    assert torch.equal(whole[1:2], gumbel_noise(keys(3)[1:2], 0, 10))


@pytest.mark.parametrize("seed", [0, 1])
def test_distribution(seed: int) -> None:
    """Mean and variance of Gumbel variables, and shares of sampled tokens."""
    noise = gumbel_noise(keys(4000, seed), 0, 50)
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / noise.numel())
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.05
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 1e-12])
    chosen = (probabilities.log() + noise[:, :5]).argmax(dim=1)
    shares = torch.bincount(chosen, minlength=5) / len(noise)
    assert (shares - probabilities).abs().max() < 0.03
    correlation = torch.corrcoef(noise[:, :8].t()) - torch.eye(8)
    assert correlation.abs().max() < 0.08


def test_each_of_seed_prompt_sample_and_position_changes_the_numbers() -> None:
    requests = [Request((3, 1, 4)), Request((3, 1)), Request((3, 1, 4), sample=1), Request((4, 1, 3))]
    found = [request_key(request, 0) for request in requests] + [request_key(requests[0], 1)]
    found += [position_key(found[0], position) % 2**64 for position in range(3)]
    assert len(set(found)) == len(found)
    assert request_key(Request((3, 1, 4)), 0) == found[0]


def test_numbers_are_the_same_in_every_version() -> None:
    """A resumed run writes the texts of the undisturbed one."""
    noise = gumbel_noise(keys(1), 0, 2)
    assert noise[0].tolist() == pytest.approx([0.05508837526847457, 3.1200626933830145])


def test_top_p_without_other_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collective, which a CUDA graph would capture."""
    monkeypatch.setattr(dist, "all_gather", None)
    choose = NextToken(SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0)), 4, 1.0, 0.6)
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert choose._most_probable(logits).isfinite().tolist() == [[True, True, False, False]]
    assert choose._choose(logits, keys(1)).item() in (0, 1)
