"""Models whose kernels the GPU computes faster than the host launches them, and the flags that help."""

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.cuda_graphs import GRAPH_IMPLEMENTATION, check_student_graphs
from mkd.config.megatron.checks.teachers import check_captured_passes, check_joined_passes
from mkd.data.text_size import TextSize
from mkd.errors import MkdConfigError
from mkd.report.flops import layer_flops

_HOST_MS, _HOST_MS_FP8, _HOST_MS_TP = 2.0, 1.0, 1.5
"""Milliseconds that the host takes to launch a layer's forward pass, further ones in FP8, and further ones for the
collectives of tensor parallelism: measured beside H200s (docs/benchmarks.md, "The teacher's forward passes on one GPU"
and "Whole trainings on two GPUs"). Other hosts may be faster."""
_UTILIZATION = 0.6
"""Share of the peak rate that layers reach."""
_CLEARLY = 0.75
"""A student is named whose layers take the GPU less than this share of the host's time: the host also launches ahead
while the GPU computes the teacher."""


def layer_times(model: Namespace, rows: int, tflops: float) -> tuple[float, float]:
    """(milliseconds of the GPU, milliseconds of the host) per layer of a forward pass.

    Args:
        model: Megatron's arguments of the model, in its layout.
        rows: rows of `seq_length` tokens of a pass.
        tflops: dense bf16 TFLOP/s of the GPU.
    """
    tp, length = model.tensor_model_parallel_size, model.seq_length
    text = TextSize(rows * length, rows * length**2, rows * length)
    is_fp8 = bool(model.fp8)
    rate = tflops * _UTILIZATION * (2.0 if is_fp8 else 1.0)
    gpu = layer_flops(model, text) / (tp * model.context_parallel_size) / rate / 1e9
    return gpu, _HOST_MS + _HOST_MS_FP8 * is_fp8 + _HOST_MS_TP * (tp > 1)


def teacher_launches(teacher: Namespace, args: Namespace, kd: KDConfig, tflops: float) -> str | None:
    """A sentence that proposes flags for a teacher that waits for the host; None if it does not, or no flag is left.

    Args:
        teacher: Megatron's arguments of the teacher, in its layout.
        args: Megatron's arguments of the job.
        kd: the flags.
        tflops: see `layer_times`.
    """
    rows = kd.teacher_micro_batch_size or args.micro_batch_size
    gpu, host = layer_times(teacher, rows, tflops)
    if gpu >= host or kd.teacher_cuda_graph:
        return None
    joined = min(rows * math.ceil(host / gpu), args.global_batch_size // args.data_parallel_size)
    changes: dict[str, dict[str, Any]] = {"--kd-teacher-cuda-graph": {"teacher_cuda_graph": True}}
    if joined > rows:
        changes[f"--kd-teacher-micro-batch-size {joined}"] = {"teacher_micro_batch_size": joined}
    flags = [flag for flag, change in changes.items() if _is_accepted(teacher, args, kd, change)]
    if not flags:
        return None
    return (
        f"by arithmetic the GPU computes a layer of the teacher in {gpu:.1f} ms, and the host may take {host:g} ms to "
        f"launch it: try {' or '.join(flags)}"
    )


def _is_accepted(teacher: Namespace, args: Namespace, kd: KDConfig, change: Mapping[str, Any]) -> bool:
    """True if the job may have a field of `KDConfig` in addition."""
    try:
        other = replace(kd, **change)
        check_captured_passes(teacher, other)
        check_joined_passes(teacher, args, other)
    except MkdConfigError:
        return False
    return True


def student_launches(args: Namespace, kd: KDConfig, tflops: float) -> str | None:
    """A sentence that proposes flags for a student that waits for the host; None if it does not, or no flag is left. A
    backward pass takes the GPU and the host twice as long as the forward pass.

    Args:
        args, kd, tflops: as in `teacher_launches`.
    """
    gpu, host = layer_times(args, args.micro_batch_size, tflops)
    if gpu >= _CLEARLY * host or args.cuda_graph_impl != "none":
        return None
    flags = [*_larger_microbatch(args), *_student_graphs(args, kd)]
    if not flags:
        return None
    return (
        f"by arithmetic the GPU computes a layer of the student, forward and backward, in {3 * gpu:.1f} ms, and the "
        f"host may take {3 * host:g} ms to launch it: try {' or '.join(flags)} (more memory; --kd-dry-run estimates it)"
    )


def _larger_microbatch(args: Namespace) -> list[str]:
    """The flag of twice the microbatch. Pipeline stages would wait longer for their first one."""
    rows = 2 * args.micro_batch_size
    is_fixed = args.rampup_batch_size is None and args.step_batch_size_schedule is None
    fits = args.global_batch_size % (rows * args.data_parallel_size) == 0
    return [f"--micro-batch-size {rows}"] if fits and is_fixed and args.pipeline_model_parallel_size == 1 else []


def _student_graphs(args: Namespace, kd: KDConfig) -> list[str]:
    """The flag of the student's CUDA graphs, if the job may have them."""
    try:
        check_student_graphs(Namespace(**{**vars(args), "cuda_graph_impl": GRAPH_IMPLEMENTATION}), kd)
    except MkdConfigError:
        return []
    return [f"--cuda-graph-impl {GRAPH_IMPLEMENTATION}"]
