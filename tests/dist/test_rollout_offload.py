"""Megatron's optimizers with --kd-rollout-offload: their state leaves and returns, and every later step is
bit-equal."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training.models import GPTModelBuilder
from torch import Tensor, nn

from mkd.distributed.groups import Groups
from mkd.models.gpt import gpt_config
from mkd.rollout.offload import StateOffload
from tests.support.dist.kd_step import MOE, STUDENT, Layout, fill, model_arguments, parallel_state

STEPS = 3


def build(layout: Layout, sizes: dict[str, Any], half: bool) -> tuple[list[nn.Module], Any]:
    """Model chunks and their optimizer."""
    args = model_arguments(STUDENT | sizes, layout, tied=True)
    args.params_dtype, args.bf16 = torch.bfloat16 if half else torch.float32, half
    chunks = GPTModelBuilder(gpt_config(args)).build_distributed_models(
        pg_collection=Groups.from_megatron().collection,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=layout.dist_opt, grad_reduce_in_fp32=half),
        data_parallel_random_init=False,
    )
    fill(chunks, "student")
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=half,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=layout.dist_opt,
    )
    return chunks, get_megatron_optimizer(config, chunks)


def steps(rank: int, size: int, layout: Layout, sizes: dict[str, Any], half: bool, away: bool) -> dict[str, Any]:
    """Bytes of parameters after some steps with gradients of ones; bytes of the state, and those left on the device."""
    with parallel_state(layout):
        chunks, optimizer = build(layout, sizes, half)
        offload = StateOffload(optimizer, chunks)
        held: list[int] = []
        left: list[int] = []
        for step in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            storages = offload.storages()
            held.append(sum(storage.nbytes() for storage in storages))
            with offload.away() if away else nullcontext():
                left.append(sum(storage.nbytes() for storage in storages))
            offload.arrive()
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter.main_grad.copy_(parameter.detach().float().sin() + step)
            optimizer.step()
        values: list[Tensor] = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        return dict(values=values, held=held, left=left, count=sum(v.numel() for v in values))


CASES = {
    "Float16Optimizer": (Layout(), {}, True, 12),
    "DistributedOptimizer": (Layout(dist_opt=True), {}, True, 6),
    "DistributedOptimizer, fp32": (Layout(dist_opt=True), {}, False, 4),
    "FP32Optimizer": (Layout(), {}, False, 8),
    "chained, experts": (Layout(ep=2, dist_opt=True), MOE, True, None),
}
"""Layout of two ranks, sizes, half precision, bytes per parameter of the state on each rank."""


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_to_the_last_bit(gloo_pool, name: str) -> None:
    layout, sizes, half, per_parameter = CASES[name]
    stayed, went = (gloo_pool(2).run(steps, layout, sizes, half, away) for away in (False, True))
    for one, other in zip(stayed, went, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["values"], other["values"], strict=True))
        assert one["held"] == one["left"] == other["held"] and other["left"] == [0] * STEPS
        assert one["held"][-1] > 0
        if per_parameter is not None:
            assert one["held"][-1] == pytest.approx(per_parameter * one["count"], rel=0.03)
