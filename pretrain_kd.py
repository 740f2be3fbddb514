"""Train a student from a frozen teacher: Megatron's pretraining with a teacher.

    torchrun --nproc-per-node 2 pretrain_kd.py --kd-teacher-hf TEACHER --kd-student-hf STUDENT --kd-ratio 0.9 \
        --data-path PREFIX --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 \
        --lr 1e-4 --save OUT --save-interval 50

Every flag that does not begin with --kd- is Megatron-LM's own. It runs on CPU (gloo) if there is no GPU, or with
MKD_DEVICE=cpu. docs/flags.md and --help describe the --kd- flags.
"""

import os
import sys
import time
from pathlib import Path

from mkd import cpu
from mkd.compat.install import install_at_start
from mkd.distributed.rank_env import check_rendezvous, default_rank_env
from mkd.errors import FULL_DISK, MkdError
from mkd.utils.logging import FILE, FILE_ONLY, log_to_file, logger


def main() -> None:
    """Parse and check the command line, build the job's parts, train."""
    if cpu.wanted():
        cpu.activate()
    install_at_start(sys.argv[1:])
    # These import megatron, which the lines above prepare.
    from mkd.job.job import Job
    from mkd.job.launch import build, train
    from mkd.job.plan import dry_run, print_plan

    job = Job.from_command_line()
    if job.args.save is not None and not job.kd.dry_run:
        log_to_file(Path(job.args.save) / FILE)
    print_plan(job)
    if job.kd.dry_run:
        dry_run(job)
        return
    check_rendezvous()
    train(job, build(job))


def run() -> None:
    """Run the command: an error that the user can correct is one line on stderr, with exit status 1."""
    try:
        default_rank_env()
        main()
    except (MkdError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL_DISK:
            raise
        # All ranks fail alike: rank 0 reports first, and torchrun ends the others while they wait.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)
        print(f"pretrain_kd.py: error: {error}", file=sys.stderr, flush=True)
        logger.error(str(error), extra=FILE_ONLY)
        sys.exit(1)


if __name__ == "__main__":
    run()
