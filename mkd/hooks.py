"""mkd's part of megatron's training loop."""

from collections.abc import Callable
from typing import Any

from mkd import arguments
from mkd.job import Job
from mkd.metrics import MetricsLog
from mkd.schedule import TeacherThenStudent


class Hooks:
    """The schedule and the metrics."""

    def __init__(self, job: Job, schedule: TeacherThenStudent, log: MetricsLog) -> None:
        self._job, self._schedule, self._log = job, schedule, log
        self.before_training = log.start
        self.after_evaluation = log.evaluation

    def around(self, schedule: Callable) -> Callable:
        run = self._schedule.around(schedule)

        def timed(*, forward_only: bool = False, **options: Any) -> list[dict]:
            if not forward_only:
                self._log.step_begins()
            return run(forward_only=forward_only, **options)

        return timed

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
