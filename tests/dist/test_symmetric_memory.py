"""A group that sums through symmetric memory, where there is none."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from mkd.distributed.groups import Groups
from mkd.distributed.symmetric_memory import SymmetricGroup, symmetric_group
from tests.support.dist.kd_step import Layout, parallel_state


def sums(rank: int, world_size: int) -> tuple[bool, list[torch.Tensor]]:
    with parallel_state(Layout(tp=world_size)):
        tp = Groups.from_megatron().tp
        group = SymmetricGroup(tp, torch.zeros(64, dtype=torch.uint8))
        assert (group.size(), group.rank()) == (world_size, rank) == (dist.get_world_size(group), tp.rank())
        values = torch.arange(4.0) * (rank + 1)
        largest, gathered = values.clone(), values.new_empty(8)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_gather_into_tensor(gathered, values, group=group)
        work = dist.all_reduce(summed := values.clone(), group=group, async_op=True)
        work.wait()
        found = [reduce_from_tensor_model_parallel_region(values, group=group), summed, largest, gathered]
        return symmetric_group(tp, 64) is tp, found


def test_other_tensors_are_left_to_the_group(gloo_pool) -> None:
    """Tensors of the CPU, other operations and work that is waited for later."""
    once = torch.arange(4.0)
    for is_same, found in gloo_pool(2).run(sums):
        assert is_same
        for values, exact in zip(found, (3 * once, 3 * once, 2 * once, torch.cat((once, 2 * once))), strict=True):
            assert torch.equal(values, exact)
