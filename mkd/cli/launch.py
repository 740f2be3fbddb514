"""Start the ranks of a job on one node, without torchrun; the teacher may have GPUs of its own.

    mkd launch --student-gpus 8 -- FLAGS                     # as torchrun --nproc-per-node 8 -m mkd train FLAGS
    mkd launch --teacher-gpus 4 --student-gpus 4 -- FLAGS
    MKD_DEVICE=cpu mkd launch --teacher-gpus 1 --student-gpus 1 -- FLAGS    # two CPU processes

FLAGS are those of mkd train. Without --teacher-gpus the ranks are those of one job, as torchrun starts them; the last
line of a failed job is its error, and after a signal the ranks have as much time as they need.

With --teacher-gpus the teacher in --kd-teacher-hf or --kd-teacher-load runs beside the student, ahead of it. Its
parallel sizes are --kd-teacher-tensor-model-parallel-size and so on (default: 1); with more GPUs than they need,
several services (mkd serve-teacher) share the work. The student is taught through --kd-teacher-url: docs/teachers.md.

Services listen at socket files in a new folder of TMPDIR that only this user can enter, and that is removed at the end;
with MKD_TEACHER_TOKEN in the environment connections are encrypted too, which is slower. Signals go to the student,
which saves and ends; then the teacher ends. If the teacher fails, or this command is killed, the student saves and
ends. The exit status is the student's, or that of the teacher if it has failed before.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

from mkd.cli.node_jobs import NodeJob, ranks_environment, run_jobs
from mkd.cli.usage import command_parser, parse_own
from mkd.config.command_words import given_words
from mkd.distributed.node_gpus import numbered_gpus
from mkd.errors import MkdConfigError, exit_status
from mkd.teacher.service.socket_file import SocketFile
from mkd.utils.logging import FILE

Flags = dict[str, list[str]]
"""Flag -> its values, in the order of a command line."""

_SIZES = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
_TEACHERS = ("--kd-teacher-hf", "--kd-teacher-load")
_SERVICE_ONLY = (*_TEACHERS, "--kd-teacher-dtype", *(f"--kd-teacher-{name}-parallel-size" for name in _SIZES))
"""Flags of the teacher that the student does not have."""
_SHARED = (
    *("--seq-length", "--micro-batch-size", "--kd-packing", "--kd-packing-multiple", "--bf16", "--fp16"),
    *("--transformer-impl", "--attention-backend", "--cp-comm-type", "--no-rope-fusion"),
    *("--distributed-timeout-minutes", "--kd-log-level"),
)
"""Flags of rows, precision and kernels that teacher and student have."""
_TOKENIZER = ("--tokenizer-", "--tiktoken-", "--null-tokenizer-", "--vocab-size", "--vocab-file", "--merge-file")
"""Beginnings of the flags of a tokenizer; a teacher's folder may have none."""


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own flags, and those of the job."""
    parser = command_parser(__doc__)
    for name in ("teacher", "student"):
        rest = " (default: 0, it runs on those of the student)" if name == "teacher" else ""
        parser.add_argument(
            f"--{name}-gpus",
            type=int,
            required=name == "student",
            default=0,
            metavar="N",
            help=f"GPUs of the {name}; on CPU, its ranks{rest}",
        )
    parser.add_argument(
        "--teacher-flags",
        default="",
        metavar="'FLAGS'",
        help="further flags of mkd serve-teacher in quotes, such as --teacher-flags='--batch-tokens 8192'",
    )
    parser.add_argument("--print", action="store_true", help="print the commands of the jobs and end")
    split = argv.index("--") if "--" in argv else len(argv)
    own, words = parse_own(parser, argv[:split]), argv[split + 1 :]
    if not words:
        parser.error("the flags of mkd train are missing: give them after --")
    return own, words


def flags_of(words: Sequence[str]) -> Flags:
    """The flags of a command line and of its files; of repeated ones the last.

    Raises:
        MkdConfigError: a word before the first flag.
    """
    found: Flags = {}
    flag = None
    for word in given_words(words):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.pop(flag, None)
            found[flag] = [value] if equals else []
        elif flag is None:
            raise MkdConfigError(f"{word} is not a flag: flags of mkd train follow --")
        else:
            found[flag].append(word)
    return found


def jobs(
    own: argparse.Namespace, flags: Flags, devices: Sequence[str] | None, sockets: Path
) -> tuple[list[NodeJob], NodeJob]:
    """The services, and the student. Without GPUs of the teacher's own there is no service.

    Args:
        own: the command's flags.
        flags: the job's flags.
        devices: GPUs of this node; None on CPU.
        sockets: the folder of the services' socket files.

    Raises:
        MkdConfigError: the flags do not fit.
    """
    _check_gpus(own, devices)
    place = None if devices is None else tuple(devices[: own.student_gpus])
    if own.teacher_gpus == 0:
        if own.teacher_flags:
            raise MkdConfigError(f"--teacher-flags {own.teacher_flags} is for services: give --teacher-gpus")
        return [], NodeJob("student", ("train", *words_of_flags(flags)), own.student_gpus, place)
    flag = _teacher_flag(flags)
    if "--kd-dry-run" in flags:
        raise MkdConfigError(
            "--kd-dry-run has no teacher to connect to: give --print to see the commands, or run mkd doctor"
        )
    folders, ranks = flags[flag], ranks_of_replica(flags)
    if not folders:
        raise MkdConfigError(f"{flag} has no value: give the teacher's folder")
    if own.teacher_gpus % (ranks * len(folders)):
        raise MkdConfigError(
            f"--teacher-gpus {own.teacher_gpus} is not a multiple of {ranks} ranks of a replica x {len(folders)} "
            "teachers: change it, or --kd-teacher-tensor-model-parallel-size and the teacher's other parallel sizes"
        )
    each = own.teacher_gpus // (ranks * len(folders))
    services = [(folder, number) for folder in folders for number in range(each)]
    urls = [
        str(SocketFile.parse("TMPDIR", f"ipc://{sockets}/teacher-{number}")) for number, _ in enumerate(services, 1)
    ]
    places = [None] * len(services)
    if devices is not None:
        places = list(batched(devices[own.student_gpus : own.student_gpus + own.teacher_gpus], ranks))
    common = service_flags(flags)
    try:
        further = shlex.split(own.teacher_flags)
    except ValueError as error:
        raise MkdConfigError(f"--teacher-flags {own.teacher_flags}: {error}") from None
    teachers = [
        NodeJob(
            "teacher" if len(services) == 1 else f"teacher {number}",
            ("serve-teacher", "--address", url, flag, folder, *common, *further),
            ranks,
            place,
        )
        for number, ((folder, _), url, place) in enumerate(zip(services, urls, places, strict=True), start=1)
    ]
    student = ("train", *student_flags(flags, folders, urls))
    return teachers, NodeJob("student", student, own.student_gpus, place)


def _check_gpus(own: argparse.Namespace, devices: Sequence[str] | None) -> None:
    """Refuse numbers of GPUs that this node does not have."""
    for name, least in (("teacher", 0), ("student", 1)):
        if (count := getattr(own, f"{name}_gpus")) < least:
            raise MkdConfigError(f"--{name}-gpus is {count}; it must be at least {least}")
    total = own.teacher_gpus + own.student_gpus
    if devices is not None and total > len(devices):
        raise MkdConfigError(
            f"--teacher-gpus {own.teacher_gpus} and --student-gpus {own.student_gpus} are {total} GPUs, and there are "
            f"{len(devices)}: give fewer, or MKD_DEVICE=cpu for ranks on CPU"
        )


def _teacher_flag(flags: Flags) -> str:
    """The flag that names the teachers' folders."""
    given = [flag for flag in _TEACHERS if flag in flags]
    if len(given) != 1:
        raise MkdConfigError(
            f"the flags after -- have {' and '.join(given) or 'no teacher to run'}: give --kd-teacher-hf or "
            "--kd-teacher-load"
        )
    return given[0]


def ranks_of_replica(flags: Flags) -> int:
    """Ranks of one replica of the teacher.

    Raises:
        MkdConfigError: a parallel size is not a number of at least 1.
    """
    ranks = 1
    for name in ("tensor-model", "pipeline-model", "context"):
        flag = f"--kd-teacher-{name}-parallel-size"
        text = " ".join(flags.get(flag, ["1"]))
        if not text.isdecimal() or int(text) < 1:
            raise MkdConfigError(f"{flag} is {text}; it must be a number of at least 1")
        ranks *= int(text)
    return ranks


def service_flags(flags: Flags) -> list[str]:
    """Flags of a service but its address and teacher.

    Raises:
        MkdConfigError: the length of the teacher's rows is not given for a teacher with another tokenizer.
    """
    kept = {flag: flags[flag] for flag in (*_SHARED, "--kd-teacher-dtype") if flag in flags}
    if "--kd-xtoken-loss" not in flags:
        kept |= {flag: values for flag, values in flags.items() if flag.startswith(_TOKENIZER)}
    for name in _SIZES:
        if (values := flags.get(f"--kd-teacher-{name}-parallel-size")) is not None:
            kept[f"--{name}-parallel-size"] = values
    if kept.get("--tensor-model-parallel-size", ["1"]) != ["1"]:
        kept["--sequence-parallel"] = []
    sizes = [*kept.get("--micro-batch-size", []), *flags.get("--eval-micro-batch-size", [])]
    if len(sizes) > 1 and all(size.isdecimal() for size in sizes):
        kept["--micro-batch-size"] = [max(sizes, key=int)]
    if "--kd-xtoken-loss" in flags:
        if "--kd-teacher-seq-length" not in flags:
            raise MkdConfigError(
                "--kd-xtoken-loss needs --kd-teacher-seq-length here: the service needs the length of the "
                "teacher's rows, which the plan of mkd doctor shows"
            )
        kept["--seq-length"] = flags["--kd-teacher-seq-length"]
    return words_of_flags(kept)


def student_flags(flags: Flags, folders: Sequence[str], urls: Sequence[str]) -> list[str]:
    """Flags of the student, taught through `urls` by the teachers in `folders`."""
    kept = {flag: values for flag, values in flags.items() if flag not in _SERVICE_ONLY}
    kept["--kd-teacher-url"] = list(urls)
    if len(folders) > 1 and "--kd-teacher-weights" not in kept and kept.get("--kd-teachers-mode", ["sum"]) == ["sum"]:
        kept["--kd-teacher-weights"] = [repr(1.0 / len(folders))] * len(folders)
    if "--kd-xtoken-loss" in flags:
        kept.setdefault("--kd-teacher-tokenizer", list(folders))
    return words_of_flags(kept)


def words_of_flags(flags: Flags) -> list[str]:
    """The words of a command line."""
    words: list[str] = []
    for flag, values in flags.items():
        is_signed = len(values) == 1 and values[0].startswith("-")
        words += [f"{flag}={values[0]}"] if is_signed else [flag, *values]
    return words


def visible_devices() -> list[str] | None:
    """GPUs of this node, as CUDA_VISIBLE_DEVICES lists them; None if the jobs run on CPU."""
    if os.environ.get("MKD_DEVICE", "").lower() == "cpu":
        return None
    if (numbers := numbered_gpus()) is not None:
        return numbers
    from mkd import cpu  # which imports torch, for seconds

    if cpu.wanted():
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def launch(own: argparse.Namespace, words: list[str]) -> int:
    """Run the jobs; returns their exit status.

    Raises:
        MkdConfigError: the flags or the environment do not fit.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise MkdConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: mkd launch starts the ranks of a node itself, so run it once, "
            "without torchrun"
        )
    flags, devices = flags_of(words), visible_devices()
    if own.print:
        teachers, student = jobs(own, flags, devices, Path(tempfile.gettempdir(), f"mkd-{os.geteuid()}"))
        for job in (*teachers, student):
            print(f"{job.name}, ranks: {job.ranks}: mkd {shlex.join(job.words)}")
        return 0
    ranks, save = own.teacher_gpus + own.student_gpus, flags.get("--save", [])
    log = Path(save[0], FILE) if save else None
    if own.teacher_gpus == 0:
        return run_jobs(*jobs(own, flags, devices, Path()), ranks_environment(ranks), log)
    with tempfile.TemporaryDirectory(prefix="mkd-", ignore_cleanup_errors=True) as folder:
        teachers, student = jobs(own, flags, devices, Path(folder))
        SocketFile.parse("TMPDIR", f"ipc://{folder}/teacher").check_folder()
        return run_jobs(teachers, student, ranks_environment(ranks), log)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status of the jobs; 1 after an error of the user."""
    own, words = parse_arguments(sys.argv[1:] if argv is None else argv)
    status = 0

    def run() -> None:
        nonlocal status
        status = launch(own, words)

    return exit_status(run) or status
