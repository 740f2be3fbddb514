"""Examination of a job's command line, on one process without GPUs: all problems, not only the first."""

import io
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.global_vars import destroy_global_vars

from mkd import cpu
from mkd.config.check_list import run_checks
from mkd.config.checks.teachers import SOURCES
from mkd.config.flags import parse_flags
from mkd.distributed.rank_env import default_connections
from mkd.job.checks import CHECKS, JobDraft
from mkd.job.doctor.environment import has_wrong_apex
from mkd.job.doctor.findings import Findings
from mkd.job.doctor.flags import checked_config, parsable_words, words_with_files
from mkd.job.job import Job
from mkd.job.memory.parameters import optimizer_bytes, parameters_of_stage

SCRIPT = "pretrain_kd.py"


@dataclass(frozen=True)
class Launch:
    """A command to examine."""

    flags: Sequence[str]
    """The words after pretrain_kd.py."""
    ranks: int
    """Number of processes on all nodes."""


def examine(launch: Launch, findings: Findings) -> Job | None:
    """Make the checks of a job (`mkd.job.checks`) as its first rank, all of them where the job would stop at the first.

    Sets the process's command line and megatron's globals; those of an earlier job are discarded.

    Returns:
        The job; None if its flags do not make one.
    """
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    words, refused = words_with_files(launch.flags, findings)
    flags = parsable_words(words, findings)
    if refused is None:  # the checks would report all that the file may hold as missing
        return None
    if not cpu.is_target() and find_spec("transformer_engine") is None:
        # A check reports that it is missing. Megatron would stop at the first flag that needs it.
        flags.append("--no-rope-fusion")
    sys.argv = [SCRIPT, *flags]
    job = None
    left_out = frozenset(refused.union(word for word in words if word.startswith("--") and word not in flags))
    # Megatron prints all its arguments.
    with _first_rank_of(launch.ranks), redirect_stdout(io.StringIO()), findings.tolerate():
        job = _check(left_out, findings)
    if not cpu.is_target() and "--no-gradient-accumulation-fusion" not in flags:
        _check_apex(job, findings)
    return job


def _check(left_out: frozenset[str], findings: Findings) -> Job | None:
    """Make all checks of the process's command line.

    Args:
        left_out: flags that were given and are left out, because they cannot be parsed.
        findings: collects the problems.

    Returns:
        The job, if its teacher fits and no option was refused.
    """
    args, given = parse_flags()
    kd = checked_config(given, findings)
    if kd is None:
        return None
    draft = JobDraft(args, kd, waits=False, sink=findings.tolerate)
    skipped = {word.split("=")[0] for word in left_out}
    if all(given[name] is None for name in SOURCES):
        skipped.add("teacher source")
    passed = run_checks(CHECKS, draft, findings.tolerate, without=frozenset(skipped))
    is_as_given = all(getattr(kd, name) == value for name, value in given.items())
    return Job.of(draft) if "teacher" in passed and is_as_given else None


@contextmanager
def _first_rank_of(ranks: int) -> Iterator[None]:
    """The environment of a job's first rank inside; restores this process's own at the end."""
    before = dict(os.environ)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    default_connections(["2"], sys.argv)  # with sizes of 1 Megatron does not read it
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check_apex(job: Job | None, findings: Findings) -> None:
    if has_wrong_apex():
        findings.problem(
            "the package apex is PyPI's project of that name and not NVIDIA Apex: pip uninstall apex, and build "
            "https://github.com/NVIDIA/apex, or give --no-gradient-accumulation-fusion to do without it"
        )
    elif job is not None and not job.args.gradient_accumulation_fusion:
        findings.warning(
            "NVIDIA Apex is not installed: weight gradients are added up in a second pass, since mkd sets "
            "--no-gradient-accumulation-fusion; with that flag this warning is left out"
        )


def checkpoint_bytes(args: Namespace) -> float:
    """Bytes of one checkpoint: bf16 or fp32 weights, and the optimizer's state."""
    whole = Namespace(**vars(args))
    whole.tensor_model_parallel_size = whole.expert_model_parallel_size = whole.expert_tensor_parallel_size = 1
    whole.use_distributed_optimizer = whole.optimizer_cpu_offload = False
    counts = [parameters_of_stage(whole, stage) for stage in range(args.pipeline_model_parallel_size)]
    return sum(args.params_dtype.itemsize * count.total + optimizer_bytes(whole, count) for count in counts)


def check_disk(args: Namespace, findings: Findings) -> None:
    """Warn if a folder has no room for two checkpoints: the old one is kept until the new one is complete."""
    if args.save is None:
        return
    path = Path(args.save).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free, size = shutil.disk_usage(existing).free, checkpoint_bytes(args)
    if free < 2 * size:
        findings.warning(
            f"--save {args.save}: {free / 2**30:.1f} GiB are free there, a checkpoint takes about {size / 2**30:.1f} "
            "and the previous one is kept until it is complete"
        )
