"""mkd/report/flops.py: operations against counts by hand, and peak rates."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from mkd.config.flags import default_arguments
from mkd.data.batch import KDBatch
from mkd.data.text_size import TextSize
from mkd.report.flops import FlopCounter, layer_flops, lm_head_flops, peak_tflops


def arguments(**changes: object) -> Namespace:
    args = default_arguments()
    sizes = dict(num_layers=3, hidden_size=8, num_attention_heads=2, ffn_hidden_size=20, padded_vocab_size=64)
    for name, value in {**sizes, "swiglu": True, **changes}.items():
        setattr(args, name, value)
    return args


def by_hand(text: TextSize, groups: int, head: int, layers: int = 3) -> float:
    """2 per multiplication, 3 for forward and two backward products; causal attention covers half of the square."""
    width, ffn, vocab, heads = 8, 20, 64, 2
    projections = width * head * (heads + 2 * groups) + head * heads * width
    attention = 2 * head * heads * text.squares / 2
    return 3 * 2 * (text.tokens * (layers * (projections + 3 * width * ffn) + width * vocab) + layers * attention)


def test_student_and_teachers() -> None:
    text = TextSize(tokens=50, squares=900, positions=64)
    gqa = dict(group_query_attention=True, num_query_groups=1, kv_channels=6)
    teachers = [arguments(), arguments(**gqa, num_layers=5)]
    counter = FlopCounter(arguments(**gqa), teachers)
    assert counter.of_student(text) == by_hand(text, groups=1, head=6)
    wanted = (by_hand(text, groups=2, head=4) + by_hand(text, groups=1, head=6, layers=5)) / 3
    assert counter.of_teachers(text) == pytest.approx(wanted, rel=1e-12)
    assert teachers[0].num_query_groups == default_arguments().num_query_groups  # nothing is written into arguments
    assert FlopCounter(arguments(), []).of_teachers(text) == 0.0


def test_a_layer_and_the_lm_head() -> None:
    """Their forward passes."""
    text = TextSize(tokens=50, squares=900, positions=64)
    assert lm_head_flops(arguments(), 50) == 2 * 50 * 8 * 64
    layer = (by_hand(text, groups=2, head=4, layers=3) - by_hand(text, groups=2, head=4, layers=2)) / 3
    assert layer_flops(arguments(), text) == pytest.approx(layer, rel=1e-12)


def test_text_size_excludes_padding() -> None:
    tokens = torch.arange(24).view(2, 12)
    sample = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(2, 12), "position_ids": tokens}
    whole = KDBatch.from_sample(sample, 99)
    assert TextSize.of([whole, whole]) == TextSize(48, 4 * 144, 48)
    padded = KDBatch.from_sample(sample | {"length": torch.tensor([5, 12])}, 99)
    assert TextSize.of([padded]) == TextSize(17, 25 + 144, 24)
    bounds = {
        "cu_seqlens": torch.tensor([[0, 3, 9], [0, 7, 7]], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, 4, 12], [0, 8, 12]], dtype=torch.int32),
    }
    assert TextSize.of([KDBatch.from_sample(sample | bounds, 99)]) == TextSize(16, 9 + 36 + 49, 24)


def test_layers_with_one_mixer() -> None:
    """Each layer counts its own mixer, and a Mamba layer its own width."""
    text = TextSize(tokens=50, squares=900, positions=64)
    mamba = dict(mamba_num_heads=3, mamba_head_dim=4, mamba_num_groups=1, mamba_state_dim=5, swiglu=False)
    args = arguments(**mamba, layer_mixers=["M", "*", "M", "-"], num_layers=4, kv_channels=4)
    projections = 2 * 8 * (2 * 12 + 2 * 5 + 3) + 2 * 12 * 8
    attention = 2 * 4 * 8 * 8 * 50 + 2 * 900 * 8
    expected = 3 * (2 * 50 * (projections + 7 * 12 * 5) + attention + 50 * (2 * 2 * 8 * 20 + 2 * 8 * 64))
    assert FlopCounter(args, []).of_student(text) == pytest.approx(expected, rel=1e-12)
    assert getattr(args, "hybrid_layer_pattern", None) is None


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_peaks(card: str, peak: float | None) -> None:
    assert peak_tflops(card) == peak


def test_formula_matches_megatron() -> None:
    """A whole batch without padding, with the arguments that megatron passes."""
    from megatron.training.training import num_floating_point_operations

    args = arguments(seq_length=16, kv_channels=4)
    text = TextSize(tokens=32, squares=2 * 256, positions=32)
    assert FlopCounter(args, []).of_student(text) == num_floating_point_operations(SimpleNamespace(**vars(args)), 2)
