"""Pairs of layers against the layers of both models."""

import pytest

from mkd.config.megatron.checks.losses import check_layer_pairs
from mkd.config.values import LayerPair
from mkd.errors import MkdConfigError
from tests.unit.config.megatron.test_architecture import parsed


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--overlap-moe-expert-parallel-comm", None),
        ("--use-megatron-fsdp", None),
        ("--use-torch-fsdp2", None),
    ],
)
def test_flags_under_which_a_layers_output_cannot_be_reached(monkeypatch, flag, value):
    args = parsed(monkeypatch, "--num-layers", 4, flag, *([value] if value else []))
    check_layer_pairs((), args, teacher_layers=4)
    with pytest.raises(MkdConfigError, match=f"--kd-hidden-loss does not work with {flag}"):
        check_layer_pairs((LayerPair(1, 1),), args, teacher_layers=4)


def test_pairs_of_layers_that_exist(monkeypatch):
    args = parsed(monkeypatch, "--num-layers", 4)
    check_layer_pairs((LayerPair(1, 8), LayerPair(4, 1)), args, teacher_layers=8)
    for pair, words in ((LayerPair(5, 1), "student has no layer 5"), (LayerPair(1, 9), "teacher has no layer 9")):
        with pytest.raises(MkdConfigError, match=words):
            check_layer_pairs((LayerPair(1, 1), pair), args, teacher_layers=8)
