"""Floating-point operations of a step, and peak rates of GPUs."""

import copy
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.training import num_floating_point_operations

from mkd.data.text_size import TextSize
from mkd.models.layer_options import MAMBA, LayerOptions

PEAK_TFLOPS = {
    r"GB200": 2500.0,
    r"B200": 2250.0,
    r"H200 NVL": 835.0,
    r"H100 NVL": 835.0,
    r"H100 PCIe": 756.0,
    r"H20\b": 148.0,
    r"GH200|H200|H100|H800": 989.0,
    r"A100|A800": 312.0,
    r"L40S": 362.0,
    r"A10\b": 125.0,
    r"L4\b": 121.0,
}
"""Dense bf16 TFLOP/s by a pattern of the card's name; the first match counts. From NVIDIA's data sheets, whose figures
with sparsity are twice as high, for the boards with the highest power limit."""


def peak_tflops(card: str) -> float | None:
    """Dense bf16 TFLOP/s of a card by its name from `torch.cuda.get_device_name`; None for an unknown card."""
    return next((peak for pattern, peak in PEAK_TFLOPS.items() if re.search(pattern, card)), None)


@dataclass(frozen=True)
class FlopCounter:
    """Operations of the student's training and of the teachers' forward passes, by Megatron's formula.

    `megatron.training.training.num_floating_point_operations`: matrix products of all layers and the LM head, causal
    attention, times 3 for forward and backward. Padding and recomputation do not count.
    """

    student: Namespace
    """Megatron's arguments."""
    teachers: Sequence[Namespace]
    """Megatron's arguments of each teacher that runs during training."""
    is_frozen: bool = False
    """True if the student's weights have no gradients (--kd-lora): two thirds of the products. Adapters count 0."""

    def of_student(self, text: TextSize) -> float:
        """Forward and backward pass."""
        return _training_flops(self.student, text) * (2.0 / 3.0 if self.is_frozen else 1.0)

    def of_teachers(self, text: TextSize) -> float:
        """Forward passes, LM head included: a third of training."""
        return sum(_training_flops(teacher, text) for teacher in self.teachers) / 3.0


def lm_head_flops(args: Namespace, tokens: float) -> float:
    """Forward pass of a model's LM head: the logits of `tokens` tokens."""
    return 2.0 * tokens * args.hidden_size * args.padded_vocab_size


def layer_flops(args: Namespace, text: TextSize) -> float:
    """Forward pass of a layer, the mean of all layers of a model. A token counts in the routed experts that it has."""
    return (_training_flops(args, text) / 3.0 - lm_head_flops(args, text.tokens)) / args.num_layers


def _training_flops(args: Namespace, text: TextSize) -> float:
    args = copy.copy(args)  # megatron's function writes into it
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    mamba = 0.0
    if (mixers := LayerOptions.of(args).layer_mixers) is not None:
        # Megatron's formula of hybrid models; it takes all Mamba layers for twice as wide as the hidden states.
        args.hybrid_layer_pattern = "".join(mixer for mixer in mixers if mixer != MAMBA)
        mamba = 3.0 * mixers.count(MAMBA) * _mamba_flops(args, text.tokens)
    return mamba + num_floating_point_operations(
        args, 0, seqlen_squared_sum_in_batch=text.squares, total_real_tokens_in_batch=text.tokens
    )


def _mamba_flops(args: Namespace, tokens: float) -> float:
    """Forward pass of a Mamba 2 layer: its projections, and Megatron's figure for the scan."""
    inner = args.mamba_num_heads * args.mamba_head_dim
    projected = 2 * inner + 2 * args.mamba_num_groups * args.mamba_state_dim + args.mamba_num_heads
    return tokens * (2 * args.hidden_size * (projected + inner) + 7 * inner * args.mamba_state_dim)
