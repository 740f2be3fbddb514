"""Adapts torch.distributed calls to gloo."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _force_backend(create: Callable) -> Callable:
    """Make every group a gloo group without a device; megatron requests NCCL by name in many places."""

    @functools.wraps(create)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = ("gloo", *args[1:])
        else:
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return create(*args, **kwargs)

    return with_gloo


def _barrier_without_devices(barrier: Callable) -> Callable:
    @functools.wraps(barrier)
    def without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    return without_devices


def _sizes_as_lists(all_to_all_single: Callable) -> Callable:
    """Convert split sizes to lists of ints, as gloo requires; the expert dispatcher passes tensors."""

    @functools.wraps(all_to_all_single)
    def with_lists(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return all_to_all_single(output, input, *sizes, group=group, async_op=async_op)

    return with_lists


def _uneven_all_gather(all_gather: Callable) -> Callable:
    """Gather tensors of different sizes (tokens of experts under expert tensor parallelism), as NCCL does, with
    broadcasts."""

    @functools.wraps(all_gather)
    def with_broadcasts(
        tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in tensors}) == 1:
            return all_gather(tensors, tensor, group=group, async_op=async_op)
        assert not async_op, "an uneven all-gather is synchronous on CPU"
        tensors[dist.get_rank(group)].copy_(tensor)
        for source, part in enumerate(tensors):
            dist.broadcast(part, group=group, group_src=source)
        return None

    return with_broadcasts


def _uneven_reduce_scatter(reduce_scatter: Callable) -> Callable:
    """The backward pass of an uneven all-gather."""

    @functools.wraps(reduce_scatter)
    def with_all_reduce(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in inputs}) == 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        assert not async_op, "an uneven reduce-scatter is synchronous on CPU"
        whole = torch.cat(inputs)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(part) for part in inputs])[dist.get_rank(group)])
        return None

    return with_all_reduce


def install() -> None:
    """Wrap the entry points of torch.distributed, which megatron calls through the module."""
    dist.init_process_group = _force_backend(dist.init_process_group)
    dist.new_group = _force_new_group(dist.new_group)
    dist.barrier = _barrier_without_devices(dist.barrier)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)
    dist.all_to_all_single = _sizes_as_lists(dist.all_to_all_single)


def _force_new_group(new_group: Callable) -> Callable:
    @functools.wraps(new_group)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return new_group(*args[:2], **kwargs)  # positional from the third on: backend and options

    return with_gloo
