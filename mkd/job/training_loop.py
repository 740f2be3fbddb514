"""Adds the schedule, the NaN check and the metrics to Megatron's training loop."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.checkpoint.megatron.best import BestCheckpoint
from mkd.data.text_size import TextSize
from mkd.job.job import Job
from mkd.job.run_record import RunRecord
from mkd.report.calibration import calibration_table
from mkd.report.metrics import IterationMetrics, MetricsLog
from mkd.report.peak_memory import PeakMemory
from mkd.report.samples import Sample
from mkd.report.start_times import StartTimes
from mkd.rollout.offload import StateOffload
from mkd.train import balance
from mkd.train.evaluation import CALIBRATION
from mkd.train.nan_check import check_first_weights, check_loss_scale, check_skipped
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from mkd.utils.logging import logger


@dataclass(frozen=True)
class TrainingParts:
    """Parts of a job on this rank; megatron builds the student from `Job.student_config`."""

    datasets: list[Any]
    """Training, validation and test set."""
    step: ForwardStep
    schedule: TeacherThenStudent
    metrics: MetricsLog
    start: StartTimes
    record: RunRecord | None = None
    """None on other ranks than 0, and without --save."""


class Hooks:
    """Implements `mkd.compat.training_loop.TrainingHooks`."""

    def __init__(self, job: Job, parts: TrainingParts, best: BestCheckpoint | None = None) -> None:
        """Args: the job, its parts on this rank, and its best checkpoint (--kd-keep-best)."""
        self._job, self._schedule, self._log, self._finite = job, parts.schedule, parts.metrics, parts.step.finite
        self._samples, self._tasks, self._best, self._record = job.samples, job.tasks, best, parts.record
        self._start = parts.start
        self._calibration: Tensor | None = None
        self._text: Tensor | None = None
        self._iteration: int | None = None
        self._loss_scale = math.inf
        self._steps = self._skipped = 0
        self._memory = PeakMemory(job.kd.teacher_cuda_graph or job.args.cuda_graph_impl != "none")

    @property
    def unfinished_evaluation(self) -> bool:
        """See `mkd.compat.training_loop.TrainingHooks`."""
        return self._job.state.unfinished_evaluation

    def before_training(self, iteration: int, chunks: list[Any], optimizer: Any) -> None:
        args = self._job.args
        check_first_weights(chunks)
        if self._job.kd.rollout_offload:
            self._schedule.offload = StateOffload(optimizer, chunks)
        if iteration >= args.train_iters:
            logger.info(f"already at iteration {iteration} of {args.train_iters}: no steps are left")
        self._log.start(iteration)
        self._start.ended("student")

    def after_training(self) -> None:
        check_skipped(self._steps, self._skipped, self._loss_scale)

    def around(self, schedule: Callable) -> Callable:
        run = self._schedule.around(schedule)
        self._calibration = None  # megatron requests a schedule at the start of each evaluation

        def timed(*, forward_only: bool = False, **options: Any) -> list[dict]:
            if not forward_only:
                self._log.step_begins()
            reports = run(forward_only=forward_only, **options)
            if self._finite is not None:
                chunks = options["model"] if isinstance(options["model"], list) else [options["model"]]
                if not forward_only:
                    self._iteration = self._job.args.curr_iteration + 1
                self._finite.after_pass(chunks, self._iteration or self._job.args.iteration, forward_only)
            self._collect(reports)
            if not forward_only:
                self._text = self._schedule.record.text.summed(self._schedule.groups.dp)
            return reports

        return timed

    def _collect(self, reports: list[dict]) -> None:
        """Sum the calibration over microbatches; megatron averages everything that stays in the reports."""
        found = [report.pop(CALIBRATION) for report in reports if CALIBRATION in report]
        if found:
            self._calibration = sum(found, start=0.0 if self._calibration is None else self._calibration)

    def after_evaluation(self, split: str, iteration: int, losses: dict[str, Any], model: list[Any]) -> None:
        calibration = None
        if self._calibration is not None:
            dist.all_reduce(self._calibration, group=self._schedule.groups.dp_cp)
            calibration = calibration_table(self._calibration)
        answered, samples = self._write(model) if split == "valid" else ({}, None)
        losses = _over_some_token(losses)
        if self._best is not None and split == "valid":
            value = {**losses, **answered}.get(self._best.metric)
            self._best.evaluated(iteration, None if value is None else float(value))
        self._log.evaluation(split, iteration, {**losses, **answered} if losses else {}, calibration)
        if samples is not None:
            self._log.samples(iteration, samples)
        self._start.ended("evaluation")

    def _write(self, model: list[Any]) -> tuple[dict[str, float], list[Sample] | None]:
        """The measurements of answers to tasks, and the samples; None without --kd-sample-prompts."""
        groups, layers, offload = self._schedule.groups, self._schedule.hidden_layers, self._schedule.offload
        if self._tasks is None and self._samples is None:
            return {}, None
        with ExitStack() as around:
            if layers is not None:
                around.enter_context(layers.paused())
            if offload is not None:
                around.callback(offload.arrive)
                around.enter_context(offload.away())
            answered = {} if self._tasks is None else self._tasks.measure(model, groups)
            return answered, None if self._samples is None else self._samples.write(model, groups)

    def after_iteration(
        self,
        iteration: int,
        losses: dict[str, Any],
        lr: float | None,
        grad_norm: float | None,
        skipped: bool,
        loss_scale: float,
    ) -> None:
        if self._record is not None:
            self._record.exchange()
        check_loss_scale(self._job.args, iteration, skipped, self._loss_scale)
        self._loss_scale = loss_scale
        self._steps, self._skipped = self._steps + 1, self._skipped + skipped
        kd, record = self._job.kd, self._schedule.record
        extra = {}
        if kd.balance:
            extra["balance"] = self._job.state.balance_factor
            balance.after_step(self._job.state, losses, self._schedule.groups.pp)
        if record.rollout is not None:
            extra |= record.rollout.metrics()
        peak = None
        if self._log.measures(iteration):
            used = torch.tensor(self._memory.measure() / 2**30, device="cuda")
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            peak = used.item()
        if self._steps == 1:
            self._start.ended("first step")
            logger.info(f"start      {self._start}")
        if not self._log.writes:
            return  # other ranks do not synchronize with the device
        self._log.iteration(
            IterationMetrics(
                iteration,
                {**losses, **extra},
                text=TextSize(*self._text.tolist()),
                lr=lr,
                grad_norm=grad_norm,
                skipped=skipped,
                ratio=record.objective.ratio,
                temperature=record.objective.spec.temperature,
                seconds=record.seconds(),
                peak_memory_gib=peak,
            )
        )


def _over_some_token(losses: dict[str, Any]) -> dict[str, Any]:
    """The losses without means over zero tokens, which are NaN: a cache may lack all texts of an evaluation."""
    if not losses.get("kd_missing", 0):
        return losses
    return {name: value for name, value in losses.items() if not math.isnan(value)}
