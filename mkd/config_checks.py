"""Which values of the --kd-* flags about teachers go together."""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from mkd.config_values import TeachersMode, XTokenLoss, require_choice
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
