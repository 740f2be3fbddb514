"""Several training steps and an evaluation of small models in any parallel layout: for workers of the pool."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from torch import Tensor, nn

from mkd.distributed.groups import Groups
from mkd.losses import LossOptions
from mkd.teacher.online import OnlineTeacher
from mkd.train.evaluation import CALIBRATION
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from tests.support.dist import kd_pairs
from tests.support.dist.faults import FAULTS
from tests.support.dist.kd_samples import ROW, VOCAB, microbatches
from tests.support.dist.kd_step import (
    Layout,
    Models,
    Part,
    build_student,
    build_teacher,
    cross_settings,
    gradients,
    parallel_state,
    parameter_parts,
)

STEPS = 3


def kd_run(
    rank: int,
    world_size: int,
    layout: Layout,
    models: Models,
    steps: int = STEPS,
    fault: str | None = None,
    evaluates: bool = True,
) -> dict[str, Any]:
    """Evaluate and train on this rank.

    Args:
        rank, world_size: of the pool.
        layout, models: what runs.
        steps: of the optimizer.
        fault: planted one, a name in `faults.FAULTS`.
        evaluates: False to train only.

    Returns:
        evaluation: {name: [sum, count]} before the first step, empty without one; steps: the same for each step (both
        empty but on the last stage's first tensor-parallel rank); grad_norms: one for each step; gradients: parts, of
        the first step; changes: parts, of every parameter over all steps; balance: {name: values} of megatron's MoE
        metrics.
    """
    set_moe_metrics_tracker(MoEMetricsTracker())
    with parallel_state(layout), FAULTS[fault]() if fault else nullcontext():
        return Run(layout, models).result(steps, evaluates)


def training_run(
    rank: int, world_size: int, layout: Layout, models: Models, steps: int = STEPS, fault: str | None = None
) -> dict[str, Any]:
    """`kd_run` without an evaluation."""
    return kd_run(rank, world_size, layout, models, steps, fault, evaluates=False)


class Run:
    """The run on this rank."""

    def __init__(self, layout: Layout, models: Models) -> None:
        self._layout, self._models, self._groups = layout, models, Groups.from_megatron()
        self._teacher = None if models.kd.is_plain_pretraining else build_teacher(layout, models, self._groups)
        self._chunks = build_student(layout, models, self._groups)
        self._optimizer = _optimizer(layout, self._chunks)
        self._schedule = TeacherThenStudent(models.kd, self._groups, self._teacher, VOCAB, lambda: 0)
        context = LossContext(
            self._groups,
            VOCAB,
            LossOptions(chunk_rows=5),
            byte_lengths=kd_pairs.byte_lengths()[0] if models.select else None,
            cross=cross_settings(models, self._groups),
            top_k=models.top_k,
        )
        self._step = ForwardStep(context)

    def result(self, steps: int, evaluates: bool = True) -> dict[str, Any]:
        before, of_teacher = parameter_parts(self._chunks), self._teacher_state()
        evaluation = self._pass(0, evaluating=True) if evaluates else {}
        reports, norms, first = [], [], []
        for step in range(steps):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            reports.append(self._pass(step))
            if step == 0:
                first = self._gradients()
            _, norm, _ = self._optimizer.step()
            norms.append(norm)
        changes = [
            (*place, new - old) for (*place, new), (*_, old) in zip(parameter_parts(self._chunks), before, strict=True)
        ]
        for name, value in self._teacher_state().items():
            assert torch.equal(value, of_teacher[name]), f"{name} of the frozen teacher has changed"
        balance = {name: entry.values.clone() for name, entry in get_moe_metrics_tracker().metrics.items()}
        return dict(
            evaluation=evaluation, steps=reports, grad_norms=norms, gradients=first, changes=changes, balance=balance
        )

    def iterator(self, batches: list[dict[str, Tensor]], step: int, evaluating: bool) -> Iterator[Any]:
        """Over the samples of a step."""
        return iter(batches)

    def _pass(self, step: int, evaluating: bool = False) -> dict[str, Tensor]:
        """One step's forward and backward passes, or an evaluation: {name: [sum, count]} over this rank's tokens."""
        layout, groups = self._layout, self._groups
        batches = microbatches(
            self._models.data,
            layout.segment_cp,
            layout.mbs,
            groups.dp.rank(),
            groups.dp.size(),
            self._models.masks,
            step,
        )
        vp, iterator = layout.vp if layout.vp > 1 else None, self.iterator(batches, step, evaluating)
        for chunk in self._chunks:
            chunk.train(not evaluating)
        with torch.no_grad() if evaluating else nullcontext():
            reports = self._schedule.around(get_forward_backward_func(pp_size=layout.pp, vp_size=vp))(
                forward_step_func=self._step,
                data_iterator=[iterator] + [None] * (vp - 1) if vp else iterator,
                model=self._chunks,
                num_microbatches=len(batches),
                seq_length=ROW,
                micro_batch_size=layout.mbs,
                forward_only=evaluating,
            )
        if not groups.is_last_stage or groups.tp.rank() > 0:
            return {}
        names = [name for name in reports[0] if name != CALIBRATION]
        return {name: sum(report[name].double() for report in reports) for name in names}

    def _gradients(self) -> list[Part]:
        """Complete on every rank, also where the distributed optimizer has left each with its own part."""
        if self._layout.dist_opt:
            for buffer in (b for chunk in self._chunks for b in chunk.buffers + chunk.expert_parallel_buffers):
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    own = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
        return gradients(self._chunks)

    def _teacher_state(self) -> dict[str, Tensor]:
        if not isinstance(self._teacher, OnlineTeacher):
            return {}
        model: nn.Module = self._teacher._model
        return {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def _optimizer(layout: Layout, chunks: list[nn.Module]) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        # Above rounding: an element whose gradient is nothing but rounding would take whole steps to either side.
        adam_eps=1e-5,
        weight_decay=0.1,
        clip_grad=1.0,
        use_distributed_optimizer=layout.dist_opt,
    )
    return get_megatron_optimizer(config, chunks)
