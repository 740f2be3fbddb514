"""Memory of the logits that a loss holds at one time."""

from argparse import Namespace
from collections.abc import Sequence

import torch

from mkd.config.kd_config import KDConfig
from mkd.job.memory.activations import tokens_of
from mkd.losses.inputs import MAX_FP32_TEMPERATURE, MIN_CHUNK_TOKENS, loss_chunks
from mkd.xtoken.loss.group_size import (
    GROUP_TOKENS,
    GroupColumns,
    fused_group_tokens,
    fused_token_bytes,
    plain_group_tokens,
)

FP32_COPIES = {"p_kl": 11, "gold": 9, "gold_relaxed": 9}
"""fp32 tensors of a group, of at most 192 MiB each, at the peak of the cross-tokenizer losses in plain torch;
derived from the peaks in docs/benchmarks.md."""
TYPICAL_FUSED_SHARE = 0.74
"""Peak of p_kl and gold in Triton relative to a group in which each token is a text chunk of its own; derived from the
peaks in docs/benchmarks.md, with 1.3 tokens per text chunk."""


def shard_of(args: Namespace) -> int:
    """Vocabulary columns on one tensor-parallel rank."""
    return args.padded_vocab_size // args.tensor_model_parallel_size


def logit_bytes(student: Namespace, teachers: Sequence[Namespace], kd: KDConfig, on_gpu: bool) -> float:
    """Bytes of logits on one rank, without the gradient of the hidden states. An ensemble is processed one teacher at a
    time.

    Args:
        student, teachers: Megatron's arguments of the models, with teachers in the student's layout.
        kd: the loss.
        on_gpu: True if the run will use GPUs.
    """
    half = student.params_dtype == torch.bfloat16 and on_gpu
    is_half = kd.logits_dtype == "bf16" or (kd.logits_dtype == "auto" and half)
    dtype = torch.bfloat16 if is_half else torch.float32
    compute = _cross_tokenizer_bytes if kd.xtoken_loss else _same_tokenizer_bytes
    return compute(student, max(map(shard_of, teachers), default=0), kd, dtype, on_gpu)


def _same_tokenizer_bytes(student: Namespace, teacher: int, kd: KDConfig, dtype: torch.dtype, on_gpu: bool) -> float:
    """The buffers of mkd/losses/fused_linear.py.

    Args:
        teacher: vocabulary columns of the teacher's shard.
    """
    columns, least = shard_of(student), MIN_CHUNK_TOKENS if on_gpu else 1
    chunks = loss_chunks(tokens_of(student), columns, dtype, kd.loss_chunk_rows, least)
    rows, slots = chunks[0].stop, min(2, len(chunks))
    in_flight = slots if student.tensor_model_parallel_size > 1 else 1
    total = slots * rows * columns * student.params_dtype.itemsize
    if dtype != student.params_dtype:
        total += in_flight * rows * columns * dtype.itemsize
    return total + in_flight * rows * dtype.itemsize * teacher


def _cross_tokenizer_bytes(student: Namespace, teacher: int, kd: KDConfig, dtype: torch.dtype, on_gpu: bool) -> float:
    """The groups of tokens in mkd/xtoken/loss/group_pass.py.

    partition_kl holds the student's logits twice: in vocabulary order, and split into common and other tokens.
    """
    kind = kd.xtoken_loss
    columns = GroupColumns(shard_of(student), teacher, teacher * student.tensor_model_parallel_size)
    if kind in FP32_COPIES:
        if on_gpu and kd.loss_impl != "eager" and kd.temperature <= MAX_FP32_TEMPERATURE:
            dtypes = dtype, student.params_dtype
            rows = kd.loss_chunk_rows or fused_group_tokens(kind, columns, *dtypes)
            return TYPICAL_FUSED_SHARE * fused_token_bytes(kind, columns, *dtypes) * min(rows, tokens_of(student))
        rows = kd.loss_chunk_rows or plain_group_tokens(columns, 4)
        return FP32_COPIES[kind] * 4.0 * max(*columns[:2], 1) * min(rows, tokens_of(student))
    budget = kd.loss_chunk_rows or plain_group_tokens(columns, dtype.itemsize, GROUP_TOKENS if on_gpu else 1)
    groups = -(-tokens_of(student) // budget)
    rows = -(-tokens_of(student) // groups)
    itemsize = dtype.itemsize * 2 + (student.params_dtype.itemsize if dtype != student.params_dtype else 0)
    return float(rows * (itemsize * shard_of(student) + dtype.itemsize * teacher))
