"""Train a student from a frozen teacher: Megatron's pretraining with a teacher.

    torchrun --nproc-per-node 2 pretrain_kd.py --kd-teacher-hf TEACHER --kd-student-hf STUDENT --kd-ratio 0.9 \
        --data-path PREFIX --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 \
        --lr 1e-4 --save OUT --save-interval 50

Every flag that does not begin with --kd- is Megatron-LM's own. It runs on CPU (gloo) if there is no GPU, or with
MKD_DEVICE=cpu. docs/flags.md and --help describe the --kd- flags.
"""

import sys

from mkd.utils.missing_packages import needs_packages

with needs_packages():
    from mkd.cli.train_job import run

if __name__ == "__main__":
    sys.exit(run())
