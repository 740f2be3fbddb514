"""The kernel that sums a tensor through symmetric memory."""

from argparse import Namespace

import pytest
import torch
from torch.distributed.distributed_c10d import AllreduceOptions

from mkd.distributed.symmetric_memory import SymmetricGroup


def test_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a part of the symmetric memory that has the dtype and the shape of the tensor."""
    called = []

    def kernel(shared: torch.Tensor, tensor: torch.Tensor, op: str, name: str, out: torch.Tensor) -> None:
        assert out is tensor and shared.untyped_storage().data_ptr() == memory.data_ptr()
        called.append((shared.shape, shared.dtype, op, name))

    monkeypatch.setattr(torch.ops, "symm_mem", Namespace(one_shot_all_reduce_copy_out=kernel))
    monkeypatch.setattr(SymmetricGroup, "_fits", lambda *_: True)
    memory, options = torch.zeros(512, dtype=torch.uint8), AllreduceOptions()
    options.asyncOp = False
    group = SymmetricGroup(Namespace(rank=lambda: 1, size=lambda: 2, group_name="tp"), memory)
    for dtype in (torch.float32, torch.bfloat16):
        assert group.allreduce([torch.ones(2, 32, dtype=dtype)], options) is None
    assert called == [((2, 32), torch.float32, "sum", "tp"), ((2, 32), torch.bfloat16, "sum", "tp")]
