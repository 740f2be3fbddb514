"""Division of a step's microbatches into forward passes of the teacher, and flags that cannot be joined."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.teachers import check_joined_passes
from mkd.data.batch import KDBatch
from mkd.errors import MkdConfigError
from mkd.teacher.forward_pass import ForwardPass, PassSize


def batch(rows: int, tokens: int, bounds: list[int] | None = None) -> KDBatch:
    ids = torch.arange(rows * tokens).view(rows, tokens)
    return KDBatch.of_tokens(ids, ids % 7, bounds)


def sizes(batches: list[KDBatch], rows: int, cp: int = 1) -> list[int]:
    return [len(run) for run in PassSize(rows, 8).divide(batches, cp)]


def test_passes_have_at_most_so_many_rows() -> None:
    assert sizes([batch(2, 8)] * 7, 6) == [3, 3, 1]
    assert sizes([batch(2, 8)] * 7, 5) == [2, 2, 2, 1]
    assert sizes([batch(2, 8)] * 3, 1) == [1, 1, 1]
    assert sizes([batch(2, 8)] * 3, 100) == [3]
    assert sizes([], 4) == []


def test_packed_rows_are_counted_by_their_tokens() -> None:
    packed = batch(1, 16, [0, 5, 16])
    assert sizes([packed] * 5, 4) == [2, 2, 1]
    assert sizes([batch(1, 8, [0, 5, 16])] * 5, 4, cp=2) == [2, 2, 1]  # half of each row


def test_only_neighbors_of_one_shape_are_joined() -> None:
    assert sizes([batch(1, 8), batch(1, 8), batch(1, 4), batch(1, 8), batch(1, 8)], 3) == [2, 1, 2]
    assert sizes([batch(1, 8), batch(1, 8, [0, 8])], 3) == [1, 1]


def test_segments_of_joined_rows_stay_apart() -> None:
    one = ForwardPass.of([batch(1, 16, [0, 5, 16]), batch(1, 16, [0, 2, 4, 16])], 1)
    assert one.tokens.shape == (1, 32)
    assert one.packed.cu_seqlens_q.tolist() == one.packed.cu_seqlens_kv_padded.tolist() == [0, 5, 16, 18, 20, 32]
    assert one.packed.cu_seqlens_q.dtype == torch.int32
    assert (one.packed.max_seqlen_q, one.packed.max_seqlen_kv) == (12, 12)


def test_a_single_microbatch_is_not_copied() -> None:
    whole = batch(2, 8)
    one = ForwardPass.of([whole], 1)
    assert one.tokens is whole.tokens and one.position_ids is whole.position_ids
    hidden = torch.zeros(8, 2, 3)
    assert one.split(hidden, None)[0] is hidden


DENSE = dict(
    tensor_model_parallel_size=2, num_experts=None, expert_model_parallel_size=1, expert_tensor_parallel_size=None
)


@pytest.mark.parametrize(
    ("teacher", "flags", "words"),
    [
        ({}, {"teacher_micro_batch_size": 5}, "is 5, but it is not a multiple of --micro-batch-size 2"),
        (
            {"num_experts": 8, "expert_model_parallel_size": 2},
            {"teacher_micro_batch_size": 4, "variable_seq_lengths": True},
            "unequally many passes",
        ),
    ],
)
def test_what_cannot_be_joined(teacher: dict[str, Any], flags: dict[str, Any], words: str) -> None:
    kd = KDConfig(teacher_hf=["T"], ratio=0.5, **flags)
    with pytest.raises(MkdConfigError, match="--kd-teacher-micro-batch-size is") as error:
        check_joined_passes(Namespace(**DENSE | teacher), Namespace(micro_batch_size=2), kd)
    assert words in str(error.value)


def test_what_can() -> None:
    kd = KDConfig(teacher_hf=["T"], ratio=0.5, teacher_micro_batch_size=6, variable_seq_lengths=True)
    for teacher in (DENSE, DENSE | {"num_experts": 8, "expert_tensor_parallel_size": 2}):
        check_joined_passes(Namespace(**teacher), Namespace(micro_batch_size=2), kd)
