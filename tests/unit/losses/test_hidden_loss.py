"""Distances between hidden states: values and hand-written gradients against the definitions in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mkd.config.values import LayerPair
from mkd.losses.hidden import cosine, hidden_loss, mse
from mkd.models.layer_maps import new_map
from tests.support.tolerance import FP32, FP64, HALF_FACTOR, assert_close_norm, norm_error

DEFINITIONS = {"mse": mse, "cosine": cosine}
KINDS = pytest.mark.parametrize("kind", DEFINITIONS)
MAPS = pytest.mark.parametrize("mapped", [True, False], ids=["map", "no map"])


def tensors(mapped: bool, rows: int = 7, width: int = 5) -> dict[str, Tensor]:
    """float64; the third token is masked, and weights differ."""
    generator = torch.Generator().manual_seed(3)
    target_width = width + 4 if mapped else width
    made = {
        "hidden": torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "target": 3.0 * torch.randn(rows, target_width, generator=generator, dtype=torch.float64),
        "weight": torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5,
    }
    if mapped:
        made["projection"] = torch.randn(target_width, width, generator=generator, dtype=torch.float64)
    made["weight"][2] = 0.0
    return made


def run(made: dict[str, Tensor], kind: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Loss, values, and the gradients under an upstream gradient of 3."""
    hidden = made["hidden"].to(dtype, copy=True).requires_grad_()
    projection = made["projection"].to(dtype, copy=True).requires_grad_() if "projection" in made else None
    weight = made["weight"].to(torch.promote_types(dtype, torch.float32))
    loss, values = hidden_loss(hidden, projection, made["target"].to(dtype), weight, kind)
    assert not values.requires_grad
    (3.0 * loss).backward()
    found = {"loss": loss.detach(), "values": values, "hidden": hidden.grad}
    return found if projection is None else found | {"projection": projection.grad}


def by_definition(made: dict[str, Tensor], kind: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    hidden = made["hidden"].to(dtype, copy=True).requires_grad_()
    projection = made["projection"].to(dtype, copy=True).requires_grad_() if "projection" in made else None
    prediction = hidden if projection is None else hidden @ projection.t()
    values = DEFINITIONS[kind](prediction, made["target"].to(dtype))
    loss = (made["weight"].to(dtype) * values).sum()
    (3.0 * loss).backward()
    found = {"loss": loss.detach(), "values": values.detach() * (made["weight"] > 0), "hidden": hidden.grad}
    return found if projection is None else found | {"projection": projection.grad}


def test_definitions_by_hand() -> None:
    ours, theirs = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [-4.0, 3.0]])
    assert mse(ours, theirs).tolist() == [2.0, 25.0]
    assert cosine(ours, theirs).tolist() == pytest.approx([1.0 - 5**-0.5, 1.0])
    assert torch.allclose(cosine(ours, theirs), 1.0 - cosine_similarity(ours, theirs))


@KINDS
@MAPS
def test_float64(kind: str, mapped: bool) -> None:
    made = tensors(mapped)
    seen, expected = run(made, kind), by_definition(made, kind)
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert seen[name].dtype == torch.float64
        assert_close_norm(seen[name], value, FP64, name)


@KINDS
@MAPS
def test_fp32(kind: str, mapped: bool) -> None:
    made = tensors(mapped, rows=60, width=130)
    seen, expected = run(made, kind, torch.float32), by_definition(made, kind)
    for name, value in expected.items():
        assert_close_norm(seen[name], value, FP32, name)


@KINDS
@MAPS
def test_bf16(kind: str, mapped: bool) -> None:
    made = tensors(mapped, rows=60, width=130)
    seen, eager = run(made, kind, torch.bfloat16), by_definition(made, kind, torch.bfloat16)
    rounded = {name: value.bfloat16().double() if name != "weight" else value for name, value in made.items()}
    expected = by_definition(rounded, kind)
    assert (seen["loss"].dtype, seen["values"].dtype, seen["hidden"].dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    for name, value in expected.items():
        assert norm_error(seen[name], value) <= HALF_FACTOR * norm_error(eager[name], value), name


@KINDS
@MAPS
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_masked_token_has_no_effect(kind: str, mapped: bool, poison: float) -> None:
    made = tensors(mapped)
    expected = run(made, kind)
    made["hidden"][2], made["target"][2] = poison, poison
    seen = run(made, kind)
    assert all(torch.equal(seen[name], value) for name, value in expected.items())
    assert seen["values"][2] == 0.0
    assert (seen["hidden"][2] == 0.0).all()


@KINDS
def test_unmasked_nan_propagates(kind: str) -> None:
    made = tensors(True)
    made["hidden"][1, 0] = torch.nan
    assert run(made, kind)["loss"].isnan()


@KINDS
@pytest.mark.parametrize("rows", [0, 1])
def test_no_tokens_give_a_connected_zero(kind: str, rows: int) -> None:
    made = tensors(True)
    made = {name: value if name == "projection" else value[2 : 2 + rows] for name, value in made.items()}
    seen = run(made, kind)
    assert seen["loss"] == 0.0
    assert (seen["projection"] == 0.0).all() and (seen["hidden"] == 0.0).all()


@KINDS
def test_equal_states_have_no_loss(kind: str) -> None:
    made = tensors(False)
    made["target"] = made["hidden"] * (1.0 if kind == "mse" else 7.0)
    seen = run(made, kind)
    assert seen["loss"].abs() < FP64
    assert seen["hidden"].norm() < FP64


def test_zero_vector_has_no_direction() -> None:
    made = tensors(False)
    made["hidden"][0] = 0.0
    seen = run(made, "cosine")
    assert seen["values"][0] == 1.0
    assert (seen["hidden"][0] == 0.0).all() and seen["hidden"].isfinite().all()


def test_only_inputs_are_saved_for_backward() -> None:
    made = tensors(True)
    hidden, projection = made["hidden"].requires_grad_(), made["projection"].requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hidden_loss(hidden, projection, made["target"], made["weight"], "mse")
    inputs = {t.data_ptr() for t in (hidden, projection, made["target"], made["weight"])}
    assert {t.data_ptr() for t in kept if t.numel() > made["weight"].numel()} <= inputs


def test_map_initialization_depends_on_seed_and_pair() -> None:
    class Config:
        hidden_size, params_dtype, sequence_parallel = 64, torch.float32, True

    def weight(pair: LayerPair, seed: int) -> Tensor:
        torch.manual_seed(torch.seed())
        return new_map(pair, Config, 96, seed).weight

    first = weight(LayerPair(1, 2), 7)
    assert first.shape == (96, 64) and first.sequence_parallel
    assert first.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert torch.equal(first, weight(LayerPair(1, 2), 7))
    assert not torch.equal(first, weight(LayerPair(2, 1), 7))
    assert not torch.equal(first, weight(LayerPair(1, 2), 8))
