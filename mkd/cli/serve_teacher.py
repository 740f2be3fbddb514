"""Run a teacher for students of other jobs.

    mkd serve-teacher --address tcp://127.0.0.1:5757 FLAGS
    mkd serve-teacher --address ipc:///tmp/mine/teacher FLAGS    # for this user's students on this host, and faster
    torchrun --nproc-per-node 8 -m mkd serve-teacher --address tcp://0.0.0.0:5757 --tensor-model-parallel-size 8 FLAGS

FLAGS are those of mkd train that describe the teacher, its parallel layout and its rows: --kd-teacher-hf or
--kd-teacher-load, --bf16, --seq-length, --micro-batch-size, --kd-packing. Its students have --kd-teacher-url with the
address. An address that is not on this machine alone needs MKD_TEACHER_TOKEN on both sides. SIGTERM and Ctrl-C end the
service after the requests that it has received. See docs/teachers.md.
"""

import argparse
import sys

from mkd.cli.job_process import exit_status_of_rank, prepare
from mkd.cli.usage import command_parser


def serve(own: argparse.Namespace, words: list[str]) -> None:
    """Check the flags, load the teacher, and serve it until a signal."""
    prepare(words)
    from megatron.training import initialize_megatron

    from mkd.checkpoint.megatron.resume_point import check_same_teacher_everywhere
    from mkd.compat.refusals import megatron_refusals
    from mkd.compat.stopping import StopSignals
    from mkd.distributed.rank_env import check_rendezvous
    from mkd.job.teacher_service import ServiceJob, ServiceOptions
    from mkd.utils.logging import logger

    job = ServiceJob.from_command_line(ServiceOptions(**vars(own)))
    logger.info(f"teacher    {job.teacher}")
    if job.is_dry_run:
        return
    check_rendezvous()
    with megatron_refusals("the flags"):
        initialize_megatron()
    check_same_teacher_everywhere(job.teacher.stored_fingerprint, job.teacher.source.origin)
    with StopSignals(then="the service ends") as stop:
        job.serve(lambda: stop.received is not None)


def parser_of_command() -> argparse.ArgumentParser:
    """The service's own flags."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--address",
        default="tcp://127.0.0.1:5757",
        metavar="URL",
        help="where the service listens, on its last pipeline stage: tcp://HOST:PORT, or ipc:///FOLDER/NAME, a socket "
        "file for students of this user on this host, in a folder with mode 0700, which is made if it is missing "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        help="join waiting requests into one forward pass of up to N tokens: faster for many small requests, and equal "
        "to rounding only (default: one forward pass for each request, equal to the last bit)",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve /health and /metrics (Prometheus) over HTTP at a port"
    )
    parser.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="with --metrics-port: the address of this machine to listen at (default: %(default)s, this machine only)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after a message on stderr."""
    words = sys.argv[1:] if argv is None else argv
    own, others = parser_of_command().parse_known_args(words)
    return exit_status_of_rank(lambda: serve(own, others))
