"""Casts of weights to a dtype with a smaller range."""

import pytest
import torch

from mkd.checkpoint import casts as module
from mkd.checkpoint.casts import CastCheck, count_not_finite, listed
from mkd.errors import MkdCheckpointError


def casts() -> CastCheck:
    return CastCheck(lambda text: MkdCheckpointError(f"--flag FOLDER: {text}"))


@pytest.mark.parametrize(
    "stored, dtype, value, fits",
    [
        (torch.float32, torch.float16, 65519.0, True),
        (torch.float32, torch.float16, 65520.0, False),
        (torch.bfloat16, torch.float16, -1e5, False),
        (torch.float32, torch.bfloat16, 1e38, True),
        (torch.float32, torch.bfloat16, 3.4e38, False),
        (torch.float64, torch.float32, 1e39, False),
        (torch.float16, torch.bfloat16, 65504.0, True),
        (torch.float32, torch.float32, 3.4e38, True),
        (torch.float32, torch.float16, torch.inf, True),
        (torch.float32, torch.float16, torch.nan, True),
    ],
)
def test_overflow(stored: torch.dtype, dtype: torch.dtype, value: float, fits: bool) -> None:
    """Values that are not finite in the folder are not overflows of the cast."""
    tensor = torch.ones(3, 4, dtype=stored)
    tensor[1, 2] = value
    if fits:
        assert torch.equal(casts().cast("w", tensor, dtype), tensor.to(dtype)) or value != value
        return
    with pytest.raises(
        MkdCheckpointError, match=r"^--flag FOLDER: 1 of the 12 values of tensor w are beyond the range"
    ):
        casts().check("w", tensor, dtype)


def test_nan_beside_an_overflow() -> None:
    with pytest.raises(MkdCheckpointError, match="2 of the 4 values"):
        casts().check("w", torch.tensor([torch.nan, 1e6, -1e6, 1.0]), torch.float16)


def test_values_that_vanish_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(module.logger, "warning", warned.append)
    check = casts()
    check.check("few", torch.cat((torch.full((5,), 1e-9), torch.ones(95))), torch.float16)
    check.check("zeros", torch.zeros(9), torch.float16)
    check.check("wide", torch.full((9,), 1e-9), torch.bfloat16)
    check.check("empty", torch.zeros(0), torch.float16)
    check.warn()
    assert warned == []
    check.check("many", torch.cat((torch.full((20,), 1e-9), torch.ones(80))), torch.float16)
    check.warn()
    (line,) = warned
    assert "10% of the values of many are below fp16's" in line


def test_count_of_values_that_are_not_finite() -> None:
    tensors = {"a": torch.ones(3), "b": torch.tensor([torch.inf, -torch.inf, torch.nan]), "ids": torch.ones(2).long()}
    assert count_not_finite(tensors.items()) == {"b": 3}
    assert count_not_finite([]) == {}
    assert listed({"a": 1, "b": 2, "c": 3, "d": 4}) == "1 values of a, 2 values of b, 3 values of c and 1 more tensors"
