"""The training job on one rank, with the flags in `sys.argv`: body of `mkd train` and pretrain_kd.py."""

import sys
from pathlib import Path

from mkd.cli.job_process import exit_status_of_rank, prepare
from mkd.config.command_words import given_words, last_value, without_files
from mkd.distributed.rank_env import check_rendezvous
from mkd.errors import is_correctable
from mkd.report.start_times import StartTimes
from mkd.utils.logging import FILE, close_file, log_to_existing_file, log_to_file


def run_job() -> None:
    """Parse and check the command line, build the job's parts, train."""
    start = StartTimes()
    _log_early_errors(without_files(sys.argv[1:]))
    prepare(sys.argv[1:])
    _log_early_errors(given_words(sys.argv[1:]))
    # These import megatron, which `prepare` prepares.
    from mkd.job.job import Job
    from mkd.job.launch import build, train
    from mkd.job.plan.memory_table import check_host_memory
    from mkd.job.plan.plan import dry_run, print_plan

    start.ended("imports")
    job = Job.from_command_line()
    if job.args.save is not None and not job.kd.dry_run:
        log_to_file(Path(job.args.save) / FILE)
    print_plan(job)
    if job.kd.dry_run:
        dry_run(job)
        return
    check_host_memory(job)
    check_rendezvous()
    start.ended("checks")
    train(job, build(job, start))


def _log_early_errors(words: list[str]) -> None:
    """Append errors of the checks to the log in --save if there is one. A refused job creates neither folder nor
    log."""
    close_file()
    save = last_value(words, "--save")
    if save is not None and "--kd-dry-run" not in words:
        log_to_existing_file(Path(save) / FILE, "error")


def run() -> int:
    """Run the job. An error that the user can correct is one line on stderr, with exit status 1."""
    return exit_status_of_rank(run_job, is_correctable)
