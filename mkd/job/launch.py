"""Launch of a checked job: builds its parts on this rank, and calls `megatron.training.pretrain`."""

import sys
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import initialize_megatron, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from mkd.compat.install import install
from mkd.compat.refusals import megatron_refusals
from mkd.compat.stopping import StopSignals
from mkd.data.datasets import provider_of
from mkd.distributed.groups import Groups
from mkd.job.epochs import set_iterations
from mkd.job.job import Job
from mkd.job.resume.selection import resolve_checkpoint
from mkd.job.rollout.servers import store_rollout_assets
from mkd.job.run_record import write_run_record
from mkd.job.saving import best_checkpoint, prepare_saving
from mkd.job.teacher_check import check_teacher_quality
from mkd.job.training_loop import Hooks, TrainingParts
from mkd.report.metrics import MetricsLog
from mkd.report.start_times import StartTimes
from mkd.teacher.interface import Teacher
from mkd.train.schedule import TeacherThenStudent


def build(job: Job, start: StartTimes) -> TrainingParts:
    """Initialize megatron, read the data, and load the teacher, each a part of `start`. Collective over all ranks.

    Raises:
        MkdError: a checkpoint, the data or the teacher cannot be used.
    """
    with megatron_refusals("the flags"):
        initialize_megatron()
    start.ended("process groups")
    set_iterations(job.args, job.kd, job.data, job.resume_point)
    metrics = job.metrics()
    resolve_checkpoint(job.args, job.kd, job.state, job.resume_point, job.teacher.source)
    groups = Groups.from_megatron()
    datasets = job.data.sets()
    start.ended("data")
    teacher = job.build_teacher(groups)
    start.ended("teacher")
    try:
        return _parts(job, groups, datasets, teacher, metrics, start)
    except BaseException:
        if teacher is not None:
            teacher.close()
        raise


def _parts(
    job: Job,
    groups: Groups,
    datasets: list[Any],
    teacher: Teacher | None,
    metrics: MetricsLog,
    start: StartTimes,
) -> TrainingParts:
    """Check the teacher and build the parts around it; see `build`."""
    step = job.forward_step(groups)
    if teacher is not None:
        check_teacher_quality(teacher, datasets[1] or datasets[0], groups, job, step)
    start.ended("check of the teacher")
    written = write_run_record(job)
    if job.args.rank == 0:
        store_rollout_assets(job.args, job.kd)
    schedule = TeacherThenStudent(
        kd=job.kd,
        groups=groups,
        teacher=teacher,
        true_vocab=job.true_vocab,
        current_iteration=lambda: job.args.curr_iteration,
        hidden_layers=job.pair_layers(groups, teacher),
        length_multiple=job.data.length_multiple,
        balance=lambda: job.state.balance_factor if job.kd.balance else 1.0,
        on_policy=job.on_policy,
        rows_before=lambda: job.args.consumed_train_samples,
    )
    return TrainingParts(datasets, step, schedule, metrics, start, written)


def train(job: Job, parts: TrainingParts) -> None:
    """Load the student and train it, evaluating and saving on the way. Collective over all ranks."""
    args = job.args
    args.check_for_nan_in_loss_and_grad = False  # megatron's check ends only the rank that finds something; mkd's all
    # pretrain initializes once more, which also sets the seeds as if there were no teacher.
    destroy_rerun_state_machine()
    best = best_checkpoint(args, job.kd)
    saving = prepare_saving(args, job.kd, job.state, best)
    then = "the job ends, without saving because there is no --save," if args.save is None else "the job saves and ends"
    stop = StopSignals(args.exit_signal, then=then).listen()
    parts.schedule.is_stopping = lambda: stop.received is not None
    install(
        training=Hooks(job, parts, best),
        checkpoints=saving,
        stop=stop,
        state=job.state,
        own_learning_rates=args.override_opt_param_scheduler,
    )
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, job.student_config),
            provider_of(parts.datasets),
            ModelType.encoder_or_decoder,
            parts.step,
            skip_model_parallel_init=True,
        )
    except SystemExit as end:
        sys.exit(end.code or stop.status)
    finally:
        if parts.schedule.teacher is not None:
            parts.schedule.teacher.close()
    if stop.status:
        sys.exit(stop.status)
