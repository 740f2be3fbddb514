"""FP8 layers of a teacher: how they compute, and where an FP8 teacher is refused.

With --kd-teacher-dtype fp8 the weights and inputs of the teacher's linear layers are E4M3 with one scale per tensor,
recomputed in every call from the largest magnitude ("current scaling"): no history is kept, so repeated forward passes
are equal. A weight is sharded over tensor-parallel ranks before it is rounded, so the teacher's last digits depend on
the layout. Embedding, norms, attention, LM head, and of a Mamba layer everything between its two projections stay in
bf16 or fp32.
"""

import math
from argparse import Namespace

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError

FP8_TOKENS, FP8_WIDTH = 8, 16
"""The number of tokens and both widths of Transformer Engine's FP8 matrix products are multiples of these."""
MIN_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of a GPU with FP8 matrix products."""


def compute_in_fp8(teacher: Namespace) -> None:
    """Have the layers of a bf16 teacher hold their weights and compute in FP8; sets its Megatron arguments in place."""
    teacher.fp8, teacher.fp8_recipe, teacher.fp8_param_gather = "e4m3", "tensorwise", True


def check_fp8_teacher(teacher: Namespace, micro_batch_size: int, kd: KDConfig) -> None:
    """Refuse --kd-teacher-dtype fp8 where it cannot work.

    Args:
        teacher: Megatron's arguments of the teacher, in its layout.
        micro_batch_size: microbatch size of the job.
        kd: the flags that contradict FP8.

    Raises:
        MkdConfigError: names the reason and what to change.
    """
    tp, cp = teacher.tensor_model_parallel_size, teacher.context_parallel_size
    # Transformer Engine checks a rank's tokens before slices of the sequence are gathered.
    parts = cp * (tp if teacher.sequence_parallel else 1)
    tokens = micro_batch_size * teacher.seq_length // parts
    widths = _widths(teacher)
    capability = cpu.compute_capability()
    for is_so, reason in (
        (cpu.is_target(), "there is no FP8 on a CPU: give bf16 (mkd doctor checks a job for GPUs)"),
        (
            teacher.transformer_impl != "transformer_engine",
            f"--transformer-impl is {teacher.transformer_impl}: FP8 products are Transformer Engine's",
        ),
        (
            capability is not None and capability < MIN_FP8_CAPABILITY,
            f"this GPU has compute capability {capability}, below {MIN_FP8_CAPABILITY}: give bf16",
        ),
        (kd.teacher_load is not None, "--kd-teacher-load cannot fill FP8 weights: export the checkpoint, and give "
         "--kd-teacher-hf"),
        (kd.teacher_offload, "FP8 weights do not leave the device: leave --kd-teacher-offload out"),
        (teacher.num_experts is not None, "its experts receive any number of tokens: give bf16"),
        (teacher.multi_latent_attention, "latent attention is untested in FP8: give bf16"),
        (
            teacher.experimental_attention_variant is not None,
            f"{teacher.experimental_attention_variant} is untested in FP8: give bf16",
        ),
        (
            kd.variable_seq_lengths,
            f"FP8 products need a multiple of {FP8_TOKENS} tokens: leave --kd-variable-seq-lengths out",
        ),
        (
            tokens % FP8_TOKENS != 0,
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


def _widths(teacher: Namespace) -> list[int]:
    """Widths of the linear layers on a tensor-parallel rank; with one mixer per layer, those of its mixers alone."""
    mixers = getattr(teacher, "layer_mixers", None)
    sharded = []
    if mixers is None or "-" in mixers:
        sharded.append(teacher.ffn_hidden_size)
    if mixers is None or "*" in mixers:
        groups = teacher.num_query_groups if teacher.group_query_attention else teacher.num_attention_heads
        sharded += [teacher.num_attention_heads * teacher.kv_channels, 2 * groups * teacher.kv_channels]
    if mixers is not None and "M" in mixers:
        inner = teacher.mamba_num_heads * teacher.mamba_head_dim
        states = teacher.mamba_num_groups * teacher.mamba_state_dim
        sharded += [inner, 2 * (inner + states) + teacher.mamba_num_heads]
    return [teacher.hidden_size, *(width // teacher.tensor_model_parallel_size for width in sharded)]
