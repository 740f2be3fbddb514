"""Sources of teachers, their combination, and their forward passes."""

import math
from typing import get_args

from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.values import TeachersMode, require_choice
from mkd.errors import MkdConfigError

SOURCES = ("teacher_hf", "teacher_load", "teacher_cache", "teacher_url")
"""Fields that name a teacher, of which one is given."""


def check_source(kd: KDFields) -> None:
    """Refuse no teacher source, and more than one."""
    values = {name: getattr(kd, name) for name in SOURCES}
    texts = {name: " ".join(value) if isinstance(value, list) else value for name, value in values.items()}
    given = [f"{flag_of(name)} {text}" for name, text in texts.items() if text is not None]
    keeps_answers = kd.uses_inference_server and kd.teacher_cache is not None and len(given) == 2
    if len(given) != 1 and not keeps_answers:
        seen = " and ".join(given) or "none"
        flags = " or ".join(map(flag_of, SOURCES))
        raise MkdConfigError(f"exactly one teacher source is needed, got {seen}: give one of {flags}")


def check_teachers(kd: KDFields) -> None:
    """Refuse weights and a mode of several teachers that do not apply to the number of teachers."""
    count, weights, mode = kd.number_of_teachers, kd.teacher_weights, kd.teachers_mode
    require_choice("--kd-teachers-mode", mode, get_args(TeachersMode))
    if count == 1:
        if weights is not None or mode != "sum":
            raise MkdConfigError(
                "--kd-teacher-weights and --kd-teachers-mode are for several teachers, and there is one: leave them "
                "out, or name more folders in --kd-teacher-hf or addresses in --kd-teacher-url"
            )
        return
    if weights is None:
        return
    listed = " ".join(f"{w:g}" for w in weights)
    if mode == "select":
        raise MkdConfigError(
            f"--kd-teacher-weights are {listed}, but --kd-teachers-mode select distills each text from one teacher, "
            "with weight 1: leave them out"
        )
    if len(weights) != count or not all(math.isfinite(w) and w > 0.0 for w in weights):
        raise MkdConfigError(f"--kd-teacher-weights are {listed}; {count} teachers need {count} finite numbers > 0")


def check_layers_of_one_teacher(kd: KDFields) -> None:
    """Refuse pairs of layers with several teachers."""
    if kd.number_of_teachers > 1 and kd.hidden_loss is not None:
        raise MkdConfigError(
            f"--kd-hidden-loss is {kd.hidden_loss}, which pairs layers with those of one teacher, and there are "
            f"{kd.number_of_teachers}: leave it out"
        )


def check_cache_missing(kd: KDFields) -> None:
    """Refuse --kd-cache-missing without a cache."""
    require_choice("--kd-cache-missing", kd.cache_missing, ("error", "ce_only"))
    if kd.teacher_cache is None and kd.cache_missing != "error":
        raise MkdConfigError(
            f"--kd-cache-missing is {kd.cache_missing}, but no cache is read: give --kd-teacher-cache, or leave it out"
        )


def check_cache(kd: KDFields) -> None:
    """Refuse flags of a teacher that runs together with cached targets."""
    for flag, given, reason in (
        ("--kd-hidden-loss", kd.hidden_loss is not None, "a cache has no hidden states"),
        ("--kd-teacher-dtype", kd.teacher_dtype is not None, "the teacher ran when the cache was written"),
        ("--kd-teacher-offload", kd.teacher_offload, "no weights of the teacher are in memory"),
    ):
        if kd.teacher_cache is not None and given:
            raise MkdConfigError(f"{flag} does not work with --kd-teacher-cache: {reason}; leave it out")


def check_teacher_passes(kd: KDFields) -> None:
    """Refuse joined forward passes of a teacher that does not run on these ranks, and with pairs of layers."""
    rows = kd.teacher_micro_batch_size
    reasons = {
        "--kd-teacher-cache": (kd.teacher_cache, "the teacher is not run"),
        "--kd-teacher-url": (
            kd.teacher_url and " ".join(kd.teacher_url),
            "a service joins requests itself (mkd serve-teacher --batch-tokens)",
        ),
        "--kd-hidden-loss": (kd.hidden_loss, "its layers are recorded microbatch by microbatch"),
    }
    for other, (value, reason) in reasons.items():
        if rows is not None and value is not None:
            raise MkdConfigError(
                f"--kd-teacher-micro-batch-size {rows} does not work with {other} {value}: {reason}; leave one of them "
                "out"
            )


def check_teacher_signals(kd: KDFields) -> None:
    """Refuse --kd-teacher-signals for teachers whose hidden states do not wait."""
    reasons = {
        "--kd-teacher-cache": (kd.teacher_cache, "cached targets wait in host memory"),
        "--kd-teacher-url": (kd.teacher_url and " ".join(kd.teacher_url), "its answers wait in host memory"),
    }
    for other, (value, reason) in reasons.items():
        if kd.teacher_signals != "auto" and value is not None:
            raise MkdConfigError(
                f"--kd-teacher-signals {kd.teacher_signals} does not work with {other} {value}: {reason}; leave it out"
            )


def check_teacher_graph(kd: KDFields) -> None:
    """Refuse --kd-teacher-cuda-graph where the passes of a teacher differ, or none runs on these ranks."""
    for other, given, reason in (
        (f"--kd-teacher-cache {kd.teacher_cache}", kd.teacher_cache is not None, "the teacher is not run"),
        (f"--kd-teacher-url {' '.join(kd.teacher_url or [])}", kd.teacher_url is not None, "a service runs it"),
        (f"--kd-hidden-loss {kd.hidden_loss}", kd.hidden_loss is not None, "a graph does not record layers"),
        ("--kd-teacher-offload", kd.teacher_offload, "a graph holds the addresses of the weights"),
        (
            f"--kd-packing {kd.packing}",
            kd.packing != "none",
            "the segments of rows differ from pass to pass",
        ),
        ("--kd-variable-seq-lengths", kd.variable_seq_lengths, "lengths differ from pass to pass"),
    ):
        if kd.teacher_cuda_graph and given:
            raise MkdConfigError(f"--kd-teacher-cuda-graph does not work with {other}: {reason}; leave one of them out")


def check_teacher_size(kd: KDFields, field: str) -> None:
    """Refuse a parallel size of the teacher with a cache, which runs no model, and with pairs of layers."""
    size = getattr(kd, field)
    reasons = {
        "--kd-teacher-cache": (kd.teacher_cache, "the teacher is not run"),
        "--kd-teacher-url": (kd.teacher_url and " ".join(kd.teacher_url), "the service has its own layout"),
        "--kd-hidden-loss": (kd.hidden_loss, "its layers are compared on the ranks of the student's"),
    }
    for other, (value, reason) in reasons.items():
        if size is not None and value is not None:
            raise MkdConfigError(
                f"{flag_of(field)} {size} does not work with {other} {value}: {reason}; leave one of them out"
            )
