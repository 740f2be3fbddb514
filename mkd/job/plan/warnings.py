"""Warnings of the plan: facts that the checks accept and that may make a run worthless."""

from argparse import Namespace
from collections.abc import Sequence

from mkd.checkpoint.source import ModelSource, TeacherSource
from mkd.config.kd_config import KDConfig
from mkd.job.job import Job
from mkd.job.teachers.inference import InferenceSource
from mkd.job.tokenizers import hash_of_tokenizer
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag


def job_warnings(job: Job) -> list[str]:
    """Facts that the checks accept and that may make a run worthless."""
    if job.kd.is_plain_pretraining:
        return []
    return [
        *uncompared_tokenizers(job.args, job.student_source, job.teacher.sources),
        *_missing_cross_entropy(job.kd),
    ]


def _missing_cross_entropy(kd: KDConfig) -> list[str]:
    """A sentence if all rows are written, whose tokens have no cross-entropy, and R leaves room for it."""
    share, ratio = kd.on_policy_over_time, kd.ratio_over_time
    if min(share.start, share.end) < 1.0 or min(ratio.start, ratio.end) == 1.0:
        return []
    return ["written texts have no cross-entropy, and at --kd-on-policy 1 the loss is R KD alone: give --kd-ratio 1"]


def uncompared_tokenizers(args: Namespace, student: ModelSource | None, teachers: Sequence[TeacherSource]) -> list[str]:
    """A sentence for each teacher whose tokenizer cannot be compared with the student's.

    None for token ids without a tokenizer (NullTokenizer), and for an inference server, which divides a sentence into
    tokens before the first step (`mkd.teacher.inference.probe`).

    Args:
        args: Megatron's, complete.
        student: source of --kd-student-hf; None without the flag.
        teachers: the teachers.
    """
    own = (student.tokenizer_hash if student is not None else None) or hash_of_tokenizer(args)
    if own is None and (args.tokenizer_type or "").startswith("Null"):
        return []
    found = []
    for one in teachers:
        is_same_model = student is not None and one.path == student.path
        if is_same_model or (own is not None and isinstance(one, InferenceSource)):
            continue
        if own is None:
            reason = f"{tokenizer_flag(args)} {args.tokenizer_model} ({args.tokenizer_type}) is no Hugging Face folder"
        elif one.tokenizer_hash is None:
            reason = "its folder has no tokenizer files" if isinstance(one, ModelSource) else "it records no tokenizer"
        else:
            continue
        found.append(
            f"the tokenizer of the teacher {one.origin} cannot be compared with the student's: {reason}; with another "
            "vocabulary the loss is meaningless"
        )
    return found
