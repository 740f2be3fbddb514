"""A teacher whose layers compute in FP8: what it needs, and how megatron is told.

Weights and inputs of its linear layers are E4M3 with one scale a tensor, found anew from the largest magnitude in every
call ("current scaling"), which keeps no history and so repeats itself. A weight is cut over tensor-parallel ranks
before it is rounded: the teacher is not the same to the last digit in every layout. Embedding, norms, attention and LM
head stay in bf16.
"""

import math
from argparse import Namespace

import torch

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError

FP8_TOKENS, FP8_WIDTH = 8, 16
"""What Transformer Engine's FP8 products need the number of tokens and both widths to be multiples of."""
LEAST_CAPABILITY = (8, 9)
"""Of a GPU with FP8 matrix products."""


def compute_in_fp8(teacher: Namespace) -> None:
    """Set megatron's arguments of a bf16 teacher so that its layers hold their weights and compute in FP8."""
    teacher.fp8, teacher.fp8_recipe, teacher.fp8_param_gather = "e4m3", "tensorwise", True


def check_fp8_teacher(teacher: Namespace, micro_batch_size: int, kd: KDConfig) -> None:
    """Refuse --kd-teacher-dtype fp8 where it cannot work.

    Args:
        teacher: Megatron's arguments of the teacher, in its layout.
        micro_batch_size: of the job.
        kd: has the flags.

    Raises:
        MkdConfigError: with the reason and what to change.
    """
    tp, cp = teacher.tensor_model_parallel_size, teacher.context_parallel_size
    # Transformer Engine looks at what a rank has before slices of the sequence are gathered.
    parts = cp * (tp if teacher.sequence_parallel else 1)
    rows = micro_batch_size * teacher.seq_length // parts
    groups = teacher.num_query_groups if teacher.group_query_attention else teacher.num_attention_heads
    queries, keys_and_values = (n * teacher.kv_channels // tp for n in (teacher.num_attention_heads, 2 * groups))
    widths = (teacher.hidden_size, teacher.ffn_hidden_size // tp, queries, keys_and_values)
    capability = torch.cuda.get_device_capability() if not cpu.is_target() and torch.cuda.is_available() else None
    for is_so, reason in (
        (cpu.is_target(), "there is no FP8 on a CPU: give bf16"),
        (
            teacher.transformer_impl != "transformer_engine",
            f"--transformer-impl is {teacher.transformer_impl}: FP8 products are Transformer Engine's",
        ),
        (
            capability is not None and capability < LEAST_CAPABILITY,
            f"this GPU has compute capability {capability}, below {LEAST_CAPABILITY}: give bf16",
        ),
        (kd.teacher_load is not None, "--kd-teacher-load cannot fill FP8 weights: export the checkpoint, and give "
         "--kd-teacher-hf"),
        (kd.teacher_offload, "FP8 weights do not leave the device: leave --kd-teacher-offload out"),
        (teacher.num_experts is not None, "its experts get any number of tokens: give bf16"),
        (teacher.multi_latent_attention, "latent attention was not tried in FP8: give bf16"),
        (
            kd.variable_seq_lengths,
            f"FP8 products need a multiple of {FP8_TOKENS} tokens: leave --kd-variable-seq-lengths out",
        ),
        (
            rows % FP8_TOKENS != 0,
            f"FP8 products need a multiple of {FP8_TOKENS} tokens, and a rank has --micro-batch-size "
            f"{micro_batch_size} x {teacher.seq_length} of a row / {parts} ranks of context and sequence parallelism",
        ),
        (
            math.gcd(*widths) % FP8_WIDTH != 0,
            f"FP8 products need widths that are multiples of {FP8_WIDTH}, and the teacher has "
            f"{', '.join(map(str, widths))} on a tensor-parallel rank: give bf16",
        ),
    ):  # fmt: skip
        if is_so:
            raise MkdConfigError(f"--kd-teacher-dtype is fp8, but {reason}")
