"""A run's command line, examined on one process without its GPUs: all that is wrong with it, not only the first."""

import io
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.global_vars import destroy_global_vars

from mkd import cpu
from mkd.checkpoint.source import EnsembleSource, ModelSource, TeacherSource, common_vocabulary
from mkd.config import data_args, flags, megatron_args
from mkd.config.kd_config import KDConfig
from mkd.config.megatron_checks import (
    check_attention_kernels,
    check_batch,
    check_context_parallel,
    check_learning_rate,
    check_ranks,
    check_required,
    check_saving,
    check_sequence,
    check_sizes,
    check_student,
    check_trackers,
    check_transformer_engine,
)
from mkd.config.run_state import RunState
from mkd.config.teacher_args import check_teacher_divides, check_teacher_layout, teacher_layout_args
from mkd.data.datasets import check_data
from mkd.data.sources.chat import ChatTokenizer
from mkd.data.sources.stores import check_chat_file, is_chat_file
from mkd.doctor.environment import has_wrong_apex
from mkd.doctor.findings import Findings
from mkd.doctor.flags import checked_config, parsable_words
from mkd.errors import MkdError
from mkd.job.job import Job, check_writable
from mkd.job.resume import select_checkpoint
from mkd.job.teacher import teacher_source
from mkd.memory.parameters import optimizer_bytes, parameters_of_stage

SCRIPT = "pretrain_kd.py"


@dataclass(frozen=True)
class Launch:
    """How a run is to be started."""

    flags: Sequence[str]
    """The words after pretrain_kd.py."""
    ranks: int
    """Processes on all nodes together."""


def examine(launch: Launch, findings: Findings) -> Job | None:
    """Check a run as pretrain_kd.py does, as its first rank; and where that ends early, what can be checked beside.

    Sets the process's command line and megatron's globals; those of an earlier job are forgotten.

    Returns:
        The job; None when its flags make none.
    """
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    flags = parsable_words(launch.flags, findings)
    if not cpu.is_target() and find_spec("transformer_engine") is None:
        # That it is missing is found below. Megatron would stop at the first flag that needs it.
        flags.append("--no-rope-fusion")
    sys.argv = [SCRIPT, *flags]
    job = None
    with _first_rank_of(launch.ranks), redirect_stdout(io.StringIO()):  # megatron tells all its arguments
        try:
            job = Job.from_command_line(findings.tolerate)
        except MkdError as error:
            findings.problem(str(error))
            _examine_parts(findings)
    if not cpu.is_target() and "--no-gradient-accumulation-fusion" not in flags:
        _check_apex(job, findings)
    return job


@contextmanager
def _first_rank_of(ranks: int) -> Iterator[None]:
    """The environment of a job's first rank; afterward that of this process again."""
    before = dict(os.environ)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # it may be set where the run starts: see check_cards
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
            "NVIDIA Apex is not installed: weight gradients are added up in a second pass; "
            "--no-gradient-accumulation-fusion says that this is meant"
        )


def _examine_parts(findings: Findings) -> None:
    """Each part of a command line by itself, as far as it makes sense alone."""
    tolerate = findings.tolerate
    try:
        args, given = flags.parse_flags()
    except MkdError as error:
        findings.problem(str(error))
        return
    kd = checked_config(given, findings)
    teacher = None
    if kd is not None and kd.teacher_hf == args.kd_teacher_hf:
        with tolerate():
            teacher = teacher_source(kd)
    else:
        opened = [_open(findings, path, "--kd-teacher-hf", ModelSource.from_hf) for path in args.kd_teacher_hf or []]
        teacher = next(filter(None, opened), None)
    student = _open(findings, args.kd_student_hf, "--kd-student-hf", ModelSource.from_hf)
    if student is not None:
        with tolerate():
            megatron_args.adopt_architecture(args, student.architecture, student.origin)
        args.tokenizer_model = args.tokenizer_model or args.kd_student_hf
    _check_training(findings, args, kd, has_sizes=student is not None or args.kd_student_hf is None)
    _check_layout(findings, args, kd, teacher)
    vocabulary = args.vocab_size
    if student is not None and teacher is not None and not args.kd_xtoken_loss:
        with tolerate():
            vocabulary = common_vocabulary(student.origin, student.vocab_size, student.tokenizer_hash, teacher)
    _check_data(findings, args, vocabulary, student.tokenizer_hash if student is not None else None)
    with tolerate():
        check_writable("--save", args.save)


def _open(
    findings: Findings, path: str | None, flag: str, opened: Callable[[str, str], ModelSource]
) -> ModelSource | None:
    source = None
    if path is not None:
        with findings.tolerate():
            source = opened(path, flag)
    return source


def _check_training(findings: Findings, args: Namespace, kd: KDConfig | None, has_sizes: bool) -> None:
    if has_sizes and not args.use_checkpoint_args:
        with findings.tolerate():
            check_required(args)
    if None not in (args.lr, args.train_iters or args.train_samples):
        with findings.tolerate():
            check_learning_rate(args)
    state = RunState()
    with findings.tolerate():
        select_checkpoint(args, state)
    if kd is not None:
        with findings.tolerate():
            megatron_args.check_load(args, kd, state)
    for check in (check_saving, check_trackers) if kd is not None else ():
        with findings.tolerate():
            check(args, kd)


def _check_layout(findings: Findings, args: Namespace, kd: KDConfig | None, teacher: TeacherSource | None) -> None:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    checks = (check_sizes, check_ranks, check_student, check_sequence, check_context_parallel, check_batch)
    number = len(checks)
    if None in (args.seq_length, args.micro_batch_size):
        number = 3
    if min(tp, pp, args.context_parallel_size, args.expert_model_parallel_size) < 1:
        number = 1
    for check in checks[:number]:
        with findings.tolerate():
            check(args)
    sizes = {} if kd is None else kd.teacher_sizes
    sources = teacher.sources if isinstance(teacher, EnsembleSource) else [teacher] if teacher else []
    for source in sources if number > 1 else []:
        if source.architecture:  # a cache of answers has none
            with findings.tolerate():
                own = teacher_layout_args(args, sizes, source.architecture.get("num_experts"))
                check_teacher_divides(source.architecture, own, args)
        if kd is not None and number == len(checks):
            with findings.tolerate():
                check_teacher_layout(args, kd, source.architecture.get("num_experts"))
    with findings.tolerate():
        check_transformer_engine(args)
    if kd is not None:
        with findings.tolerate():
            check_attention_kernels(args, kd)


def _check_data(findings: Findings, args: Namespace, vocabulary: int | None, tokenizer_hash: str | None) -> None:
    names: list[str] = []
    with findings.tolerate():
        names = data_args.data_prefixes(args)
    for name in names:
        with findings.tolerate():
            if is_chat_file(name) and args.tokenizer_model is not None:
                check_chat_file(name, ChatTokenizer(args.tokenizer_model))
            elif not is_chat_file(name):
                check_data([name], vocabulary or sys.maxsize, tokenizer_hash)


def checkpoint_bytes(args: Namespace) -> float:
    """Of one saved iteration of a job: bf16 weights, or fp32 ones, and the optimizer's state."""
    whole = Namespace(**vars(args))
    whole.tensor_model_parallel_size = whole.expert_model_parallel_size = whole.expert_tensor_parallel_size = 1
    whole.use_distributed_optimizer = whole.optimizer_cpu_offload = False
    counts = [parameters_of_stage(whole, stage) for stage in range(args.pipeline_model_parallel_size)]
    return sum(args.params_dtype.itemsize * count.total + optimizer_bytes(whole, count) for count in counts)


def check_disk(args: Namespace, findings: Findings) -> None:
    """Warn where a folder has no room for two checkpoints: the old one stays until the new one is whole."""
    if args.save is None:
        return
    path = Path(args.save).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free, size = shutil.disk_usage(existing).free, checkpoint_bytes(args)
    if free < 2 * size:
        findings.warning(
            f"--save {args.save}: {free / 2**30:.1f} GiB are free there, a checkpoint takes about {size / 2**30:.1f} "
            "and the one before it stays until it is whole"
        )
