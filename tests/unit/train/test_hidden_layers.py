"""Intermediate layers while the student writes samples. Their losses: tests/dist/test_hidden_layers.py."""

import torch

from mkd.train.hidden_layers import HiddenLayers


def test_paused_layers_measure_nothing() -> None:
    """No microbatch is current then, or one whose targets are used up."""
    layers = HiddenLayers.__new__(HiddenLayers)
    layers._is_paused = False
    with layers.paused():
        assert layers._after_layer(None, None, None, (), (torch.ones(1), None)) is None
    assert not layers._is_paused
