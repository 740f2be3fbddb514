"""Which values of the --kd-* flags about teachers go together."""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from mkd.config.values import TeachersMode, XTokenLoss, require_choice
from mkd.errors import MkdConfigError


def check_teachers(count: int, weights: Sequence[float] | None, mode: str, hidden_loss: str | None) -> None:
    """Raise MkdConfigError for settings of several teachers that are not theirs.

    Args:
        count: how many there are.
        weights: --kd-teacher-weights.
        mode: --kd-teachers-mode.
        hidden_loss: --kd-hidden-loss.
    """
    require_choice("--kd-teachers-mode", mode, get_args(TeachersMode))
    if count == 1:
        if weights is not None or mode != "sum":
            raise MkdConfigError(
                "--kd-teacher-weights and --kd-teachers-mode are for several teachers, and there is one: leave them "
                "out, or name more folders in --kd-teacher-hf"
            )
        return
    if weights is not None and mode == "select":
        raise MkdConfigError(
            f"--kd-teacher-weights are {' '.join(f'{w:g}' for w in weights)}, but --kd-teachers-mode select lets one "
            "teacher teach each text, with weight 1: leave them out"
        )
    if weights is not None and (len(weights) != count or not all(math.isfinite(w) and w > 0.0 for w in weights)):
        raise MkdConfigError(
            f"--kd-teacher-weights are {' '.join(f'{w:g}' for w in weights)}; {count} teachers need {count} finite "
            "numbers > 0"
        )
    if hidden_loss is not None:
        raise MkdConfigError(
            f"--kd-hidden-loss is {hidden_loss}, which pairs layers with those of one teacher, and there are {count}: "
            "leave it out"
        )


def check_other_tokenizer(
    xtoken_loss: str | None,
    *,
    settings: Mapping[str, object],
    hidden_loss: str | None,
    teacher_cache: str | None,
    loss_impl: str,
) -> None:
    """Raise MkdConfigError for settings of a teacher with another tokenizer without --kd-xtoken-loss, or that do not go
    with it.

    Args:
        xtoken_loss: --kd-xtoken-loss.
        settings: end of the flag's name -> value of what else belongs to such a teacher.
        hidden_loss, teacher_cache, loss_impl: the flags of these names.
    """
    if xtoken_loss is None:
        for name, value in settings.items():
            if value is not None:
                raise MkdConfigError(
                    f"--kd-{name} is {value}, which is for a teacher with another tokenizer: give --kd-xtoken-loss, or "
                    "leave it out"
                )
        return
    require_choice("--kd-xtoken-loss", xtoken_loss, get_args(XTokenLoss))
    length = settings["teacher-seq-length"]
    if length is not None and length < 1:
        raise MkdConfigError(f"--kd-teacher-seq-length is {length}; it must be at least 1")
    reasons = {
        "--kd-hidden-loss": (hidden_loss, "its layers put out something for other tokens"),
        "--kd-teacher-cache": (teacher_cache, "a cache has answers about the student's own tokens"),
    }
    for flag, (value, reason) in reasons.items():
        if value is not None:
            raise MkdConfigError(
                f"--kd-xtoken-loss is {xtoken_loss}, for a teacher with another tokenizer: {flag} {value} does not go "
                f"with it ({reason})"
            )
    if loss_impl == "reference":
        raise MkdConfigError("--kd-loss-impl reference does not have --kd-xtoken-loss: give auto, eager or triton")


def check_cache(
    teacher_cache: str | None,
    missing: str,
    *,
    hidden_loss: str | None,
    teacher_dtype: str | None,
    teacher_offload: bool,
) -> None:
    """Raise MkdConfigError for flags that a cache of the teacher's answers makes no sense of, or needs.

    Args:
        teacher_cache: --kd-teacher-cache.
        missing: --kd-cache-missing.
        hidden_loss, teacher_dtype, teacher_offload: the flags of these names.
    """
    require_choice("--kd-cache-missing", missing, ("error", "ce_only"))
    if teacher_cache is None:
        if missing != "error":
            raise MkdConfigError(
                f"--kd-cache-missing is {missing}, but no cache is read: give --kd-teacher-cache, or leave it out"
            )
        return
    for flag, given, reason in (
        ("--kd-hidden-loss", hidden_loss is not None, "a cache has no hidden states"),
        ("--kd-teacher-dtype", teacher_dtype is not None, "the teacher ran when the cache was written"),
        ("--kd-teacher-offload", teacher_offload, "no weights of the teacher are in memory"),
    ):
        if given:
            raise MkdConfigError(f"{flag} does not work with --kd-teacher-cache: {reason}; leave it out")


def check_teacher_sizes(sizes: Mapping[str, int], teacher_cache: str | None, hidden_loss: str | None) -> None:
    """Raise MkdConfigError for parallel sizes of the teacher that are none, or that do not go with another flag.

    Args:
        sizes: Megatron argument name -> value of --kd-teacher-<name>, of those that are given.
        teacher_cache, hidden_loss: the flags of these names.
    """
    reasons = {
        "--kd-teacher-cache": (teacher_cache, "no model of it runs"),
        "--kd-hidden-loss": (hidden_loss, "its layers are compared where the student's are"),
    }
    for name, size in sizes.items():
        flag = f"--kd-teacher-{name.replace('_', '-')}"
        if size < 1:
            raise MkdConfigError(f"{flag} is {size}; it must be at least 1")
        for other, (value, reason) in reasons.items():
            if value is not None:
                raise MkdConfigError(
                    f"{flag} {size} does not work with {other} {value}: {reason}; leave one of them out"
                )


def check_snapshots(interval: int | None, keep: int | None) -> None:
    """Raise MkdConfigError for a --kd-save-hf-interval or --kd-save-hf-keep that is none, or for the second alone."""
    for name, value in (("interval", interval), ("keep", keep)):
        if value is not None and value < 1:
            raise MkdConfigError(f"--kd-save-hf-{name} is {value}; it must be at least 1")
    if keep is not None and interval is None:
        raise MkdConfigError(
            f"--kd-save-hf-keep is {keep}, but no Hugging Face folders are written: give --kd-save-hf-interval, or "
            "leave it out"
        )


def check_tracking(compare_interval: int | None, plain: bool, experiment: str | None, uri: str | None) -> None:
    """Raise MkdConfigError for flags of what is measured and where it is written that do not go together.

    Args:
        compare_interval: --kd-compare-interval.
        plain: whether the teacher never runs.
        experiment, uri: --kd-mlflow-experiment and --kd-mlflow-uri.
    """
    if compare_interval is not None:
        if compare_interval < 1:
            raise MkdConfigError(f"--kd-compare-interval is {compare_interval}; it must be at least 1")
        if plain:
            raise MkdConfigError(
                f"--kd-compare-interval is {compare_interval}, but at R = 0 the teacher is not run: leave it out"
            )
    if uri is not None and experiment is None:
        raise MkdConfigError(
            f"--kd-mlflow-uri is {uri}, but nothing is written to MLflow: give --kd-mlflow-experiment, or leave it out"
        )
