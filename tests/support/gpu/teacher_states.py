"""Write the hidden states of the teacher of a job. Runs on each of its ranks, with the flags of pretrain_kd.py.

STATES=FILE.pt torchrun --nproc-per-node 2 tests/support/gpu/teacher_states.py FLAGS
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from mkd.cli.job_process import exit_status_of_rank, prepare

ROWS = 2


def run() -> None:
    """Write [ROWS x --seq-length, H] fp32 final hidden states for random tokens to $STATES; layouts are TP and SP."""
    prepare(sys.argv[1:])
    # These import megatron, which `prepare` prepares.
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.training import initialize_megatron

    from mkd.data.lookahead import Lookahead
    from mkd.data.microbatches import next_microbatches
    from mkd.distributed.groups import Groups
    from mkd.job.job import Job

    job = Job.from_command_line()
    initialize_megatron()
    groups = Groups.from_megatron()
    teacher = job.teacher.build(groups)
    shape, generator = (ROWS, job.args.seq_length), torch.Generator().manual_seed(5)
    sample = {
        **{name: torch.randint(0, job.true_vocab, shape, generator=generator) for name in ("tokens", "labels")},
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(job.args.seq_length).repeat(ROWS, 1),
    }
    batches = teacher.prepare(next_microbatches(iter([sample]), 1, job.true_vocab), Lookahead.empty())
    (signal,) = teacher.signals([batch.on_rank(groups.cp) for batch in batches])
    hidden = signal.hidden
    if job.args.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)
    if groups.tp.rank() == 0:
        torch.save(hidden.float().flatten(0, -2).cpu(), os.environ["STATES"])
    torch.distributed.barrier()  # a rank that ended before would take its part of the collectives with it


if __name__ == "__main__":
    sys.exit(exit_status_of_rank(run))
