"""mkd's part of megatron's training loop."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mkd import arguments
from mkd.evaluation import CALIBRATION, calibration_table
from mkd.job import Job
from mkd.metrics import MetricsLog
from mkd.schedule import TeacherThenStudent


class Hooks:
    """The schedule and the metrics."""

    def __init__(self, job: Job, schedule: TeacherThenStudent, log: MetricsLog) -> None:
        self._job, self._schedule, self._log = job, schedule, log
        self._calibration: Tensor | None = None
        self.before_training = log.start

    def around(self, schedule: Callable) -> Callable:
        run = self._schedule.around(schedule)
        self._calibration = None  # megatron asks for a schedule at the beginning of each evaluation

        def timed(*, forward_only: bool = False, **options: Any) -> list[dict]:
            if not forward_only:
                self._log.step_begins()
            reports = run(forward_only=forward_only, **options)
            self._collect(reports)
            return reports

        return timed

    def _collect(self, reports: list[dict]) -> None:
        """Keep what megatron, which knows means only, cannot add up."""
        found = [report.pop(CALIBRATION) for report in reports if CALIBRATION in report]
        if found:
            self._calibration = sum(found, start=0.0 if self._calibration is None else self._calibration)

    def after_evaluation(self, split: str, iteration: int, losses: dict[str, Any]) -> None:
        calibration = None
        if self._calibration is not None:
            dist.all_reduce(self._calibration, group=self._schedule.groups.dp_cp)
            calibration = calibration_table(self._calibration)
        self._log.evaluation(split, iteration, losses, calibration)

    def after_iteration(
        self, iteration: int, losses: dict[str, Any], lr: float | None, grad_norm: float | None, skipped: bool
    ) -> None:
        kd = self._job.kd
        self._log.iteration(
            iteration,
            losses,
            samples=arguments.current_global_batch_size(),
            lr=lr,
            grad_norm=grad_norm,
            skipped=skipped,
            extra={
                "ratio": kd.ratio_over_time.value(iteration - 1),
                "temperature": kd.temperature_over_time.value(iteration - 1),
            },
        )
