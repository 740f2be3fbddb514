"""The number of tokens in a group of text chunks, from the memory that the tensors of a group take."""

from typing import NamedTuple

import torch

from mkd.config.values import XTokenLoss
from mkd.losses.inputs import CHUNK_BYTES

GROUP_TOKENS = 3072
"""Minimum of tokens in a group of partition_kl on a GPU. A group launches 500 small kernels, and with fewer tokens the
GPU waits for the launches; measured in docs/benchmarks.md."""
FUSED_GROUP_BYTES = 2 * 2**30
"""Size of a group of p_kl and gold in Triton if each token is a text chunk of its own; the others share their fp32
numbers. Every group reads both LM heads and adds to the gradient of one."""
UNCOMMON_TOP_K = 8192
"""Default number of sorted probabilities that gold compares."""
_SORTED_BYTES = 72
"""Bytes per sorted probability of gold: values, columns and sorting of both models."""


class GroupColumns(NamedTuple):
    """Vocabulary columns whose logits a group holds."""

    student: int
    """Columns of the student's LM head on this rank."""
    teacher: int
    all_teacher: int
    """The teacher's of all ranks, over which p_kl sums projected probabilities."""


def fused_token_bytes(kind: XTokenLoss, columns: GroupColumns, logits: torch.dtype, hidden: torch.dtype) -> int:
    """Bytes per token of p_kl and gold in Triton, if each token is a text chunk of its own.

    Args:
        kind: p_kl, gold or gold_relaxed.
        columns: columns of both models.
        logits: dtype of the logits.
        hidden: dtype of hidden states, LM heads and the gradient of the logits, which is written over logits of the
            same dtype.
    """
    products = logits.itemsize * (columns.student + columns.teacher)
    if logits != hidden:
        products += hidden.itemsize * columns.student
    if kind == "p_kl":
        across = 2 if columns.all_teacher > columns.teacher else 1  # projected, and sorted by rank
        return products + 4 * (columns.student + columns.teacher + across * columns.all_teacher)
    return products + 4 * (columns.student + columns.teacher) + _SORTED_BYTES * UNCOMMON_TOP_K


def fused_group_tokens(kind: XTokenLoss, columns: GroupColumns, logits: torch.dtype, hidden: torch.dtype) -> int:
    """Default tokens of a group of p_kl and gold in Triton."""
    return max(1, FUSED_GROUP_BYTES // max(fused_token_bytes(kind, columns, logits, hidden), 1))


def plain_group_tokens(columns: GroupColumns, itemsize: int, least: int = 1) -> int:
    """Default tokens of a group of the other losses: `CHUNK_BYTES` of one model's numbers, but at least `least`."""
    return max(least, CHUNK_BYTES // (max(columns.student, columns.teacher, 1) * itemsize))
