"""Train a student from a frozen teacher: megatron's pretraining with a teacher beside it.

    torchrun --nproc-per-node 2 pretrain_kd.py --kd-teacher-hf TEACHER --kd-student-hf STUDENT --kd-ratio 0.9 \
        --data-path PREFIX --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 \
        --lr 1e-4 --save OUT --save-interval 50

Every flag that does not begin with --kd- is Megatron-LM's own. It runs on CPU (gloo) where there is no GPU, or with
MKD_DEVICE=cpu. docs/ describes the --kd- flags; so does --help.
"""

import os
import sys
import time
from pathlib import Path

from mkd import compat, cpu
from mkd.compat.quiet import silence_megatron
from mkd.distributed.rank_env import check_rendezvous, default_rank_env
from mkd.errors import FULL_DISK, MkdError
from mkd.utils.logging import FILE, FILE_ONLY, log_to_file, logger


def prepare() -> None:
    """Get ready for megatron, which is imported only then: the CPU backend must be in place first."""
    if cpu.wanted():
        cpu.activate()
    silence_megatron(sys.argv[1:])
    compat.use_prebuilt_dataset_helpers()
    compat.balance_experts_over_unequal_ranks()


def main() -> None:
    """Check everything, load both models, train."""
    prepare()
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import initialize_megatron, pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from mkd.data.datasets import provider_of
    from mkd.distributed.groups import Groups
    from mkd.job.job import Job
    from mkd.job.plan import dry_run, print_plan, record
    from mkd.job.resume import install_saving, resolve_checkpoint
    from mkd.job.teacher_check import check_teacher_quality
    from mkd.job.training_loop import Hooks
    from mkd.train.schedule import TeacherThenStudent

    job = Job.from_command_line()
    args = job.args
    if args.save is not None and not job.kd.dry_run:
        log_to_file(Path(args.save) / FILE)
    print_plan(job)
    if job.kd.dry_run:
        dry_run(job)
        return

    check_rendezvous()
    initialize_megatron()
    metrics = job.metrics()
    resolve_checkpoint(args, job.kd, job.state, job.resume_point, job.teacher.source)
    groups = Groups.from_megatron()
    datasets = job.data.sets()
    teacher = job.build_teacher(groups)
    step = job.forward_step(groups)
    if teacher is not None:
        check_teacher_quality(teacher, datasets[1] or datasets[0], groups, job, step)
    record(job)

    schedule = TeacherThenStudent(
        kd=job.kd,
        groups=groups,
        teacher=teacher,
        true_vocab=job.true_vocab,
        current_iteration=lambda: args.curr_iteration,
        hidden_layers=job.pair_layers(groups, teacher),
        length_multiple=job.data.length_multiple,
        balance=lambda: job.state.balance_factor if job.kd.balance else 1.0,
    )
    # pretrain initializes once more, which also sets the seeds as if there were no teacher.
    destroy_rerun_state_machine()
    compat.install_training_hooks(Hooks(job, schedule, metrics, step.finite))
    args.check_for_nan_in_loss_and_grad = False  # megatron would stop the one rank that finds something first
    install_saving(args, job.kd, job.state)
    pretrain(
        pretrain_cfg_container_from_args(args, job.student_config),
        provider_of(datasets),
        ModelType.encoder_or_decoder,
        step,
        skip_model_parallel_init=True,
    )


def run() -> None:
    """As a command: what a user can mend is told in one line, and the exit status is 1."""
    try:
        default_rank_env()
        main()
    except (MkdError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL_DISK:
            raise
        # All ranks fail alike; the first one speaks, and torchrun ends the others while they wait.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)
        print(f"pretrain_kd.py: error: {error}", file=sys.stderr, flush=True)
        logger.error(str(error), extra=FILE_ONLY)
        sys.exit(1)


if __name__ == "__main__":
    run()
