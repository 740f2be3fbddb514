"""The objective: R and T, the divergence, pairs of layers, top columns, and teachers with other tokenizers."""

import math
from typing import get_args

from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.loss_spec import SKEWED, Divergence, LossSpec
from mkd.config.schedules import Schedule
from mkd.config.values import HiddenLossType, XTokenLoss, require_choice, require_ratio, require_temperature
from mkd.errors import MkdConfigError


def check_ratio(kd: KDFields) -> None:
    """Refuse an R that is missing, given twice or outside [0, 1]."""
    if kd.ratio_schedule == "constant":
        if kd.ratio is None:
            raise MkdConfigError("--kd-ratio is required: loss = (1 - R) * CE + R * T^2 * KD, with R in [0, 1]")
        require_ratio("--kd-ratio", kd.ratio)
        return
    if kd.ratio is not None:
        raise MkdConfigError(
            f"--kd-ratio {kd.ratio} and --kd-ratio-schedule {kd.ratio_schedule} both set R: give one of them"
        )
    schedule = Schedule.parse("--kd-ratio-schedule", kd.ratio_schedule)
    require_ratio("START of --kd-ratio-schedule", schedule.start)
    require_ratio("END of --kd-ratio-schedule", schedule.end)


def check_balance(kd: KDFields) -> None:
    """Refuse --kd-balance where CE or KD is not computed."""
    ratio = kd.ratio_over_time
    if kd.balance and (max(ratio.start, ratio.end) == 1.0 or kd.is_plain_pretraining):
        raise MkdConfigError(
            f"--kd-balance scales KD to the size of CE, and with R = {ratio} one of them is not computed: leave it "
            "out, or give an R between 0 and 1"
        )


def check_temperature(kd: KDFields) -> None:
    """Refuse a T that is given twice, or is not finite and above 0."""
    require_temperature("--kd-temperature", kd.temperature)
    if kd.temperature_schedule == "constant":
        return
    if kd.temperature != 1.0:
        raise MkdConfigError(
            f"--kd-temperature {kd.temperature} and --kd-temperature-schedule {kd.temperature_schedule} both set T: "
            "give one of them"
        )
    schedule = Schedule.parse("--kd-temperature-schedule", kd.temperature_schedule)
    require_temperature("START of --kd-temperature-schedule", schedule.start)
    require_temperature("END of --kd-temperature-schedule", schedule.end)


def check_loss(kd: KDFields) -> None:
    """Refuse a divergence that does not exist, and parameters out of its range."""
    require_choice("--kd-loss", kd.loss, get_args(Divergence))
    kd.loss_spec(0)


def check_unused_parameters(kd: KDFields) -> None:
    """Refuse parameters that the divergence does not have."""
    for flag, value, default, users in (
        ("--kd-beta", kd.beta, LossSpec.beta, ("jsd",)),
        ("--kd-skew", kd.skew, LossSpec.skew, SKEWED),
    ):
        if value != default and kd.loss not in users:
            raise MkdConfigError(
                f"{flag} is {value}, which --kd-loss {kd.loss} does not use: leave it out, or give --kd-loss "
                f"{' or '.join(users)}"
            )


def check_z_loss(kd: KDFields) -> None:
    """Refuse a z-loss where CE, whose part it is, is not computed or is Megatron's own."""
    ratio = kd.ratio_over_time
    if kd.z_loss > 0.0 and ratio.start == ratio.end == 1.0:
        raise MkdConfigError(
            f"--kd-z-loss is {kd.z_loss}, but it is a part of CE, and at R = 1 CE is not computed: leave it out, or "
            "give a --kd-ratio below 1"
        )
    if kd.z_loss > 0.0 and kd.is_plain_pretraining:
        raise MkdConfigError(
            f"--kd-z-loss is {kd.z_loss}, but at R = 0 the loss is Megatron's own, which has none: leave it out, or "
            "give a --kd-ratio above 0"
        )


def check_hidden_loss(kd: KDFields) -> None:
    """Refuse invalid pairs of layers, their parameters without pairs, and pairs where the teacher is not run."""
    require_choice("--kd-hidden-loss-type", kd.hidden_loss_type, get_args(HiddenLossType))
    if not (math.isfinite(kd.hidden_loss_weight) and kd.hidden_loss_weight > 0.0):
        raise MkdConfigError(
            f"--kd-hidden-loss-weight is {kd.hidden_loss_weight}; a weight must be a finite number > 0"
        )
    if kd.hidden_loss is None:
        given = {"weight": kd.hidden_loss_weight != 1.0, "type": kd.hidden_loss_type != "mse"}
        for name in (name for name, changed in given.items() if changed):
            raise MkdConfigError(
                f"--kd-hidden-loss-{name} is {getattr(kd, 'hidden_loss_' + name)}, but no layers are paired: give "
                "--kd-hidden-loss S:T,..., or leave it out"
            )
    if kd.layer_pairs and kd.is_plain_pretraining:
        flag = "--kd-ratio" if kd.ratio_schedule == "constant" else "--kd-ratio-schedule"
        raise MkdConfigError(
            f"--kd-hidden-loss is {kd.hidden_loss}, but {flag} makes R = 0 for the whole run, where the teacher is not "
            "run: leave it out, or give an R above 0"
        )


def check_top_k(kd: KDFields) -> None:
    """Refuse a K that is too small, a tail without K, and K where the teacher is not run."""
    require_choice("--kd-top-k-tail", kd.top_k_tail, ("bucket", "renormalize"))
    if kd.top_k is None:
        if kd.top_k_tail != "bucket" and kd.teacher_cache is None:
            raise MkdConfigError(f"--kd-top-k-tail is {kd.top_k_tail}, but all tokens are used: give --kd-top-k")
        return
    least = 2 if kd.top_k_tail == "renormalize" else 1
    if kd.top_k < least:
        raise MkdConfigError(
            f"--kd-top-k is {kd.top_k}; with --kd-top-k-tail {kd.top_k_tail} it must be at least {least}"
        )
    if kd.is_plain_pretraining:
        raise MkdConfigError(f"--kd-top-k is {kd.top_k}, but at R = 0 the teacher is not run: leave it out")


def check_xtoken_loss(kd: KDFields) -> None:
    """Refuse flags of a teacher with a different tokenizer without --kd-xtoken-loss, and flags that exclude it."""
    if kd.xtoken_loss is None:
        for name in ("projection", "teacher_seq_length"):
            if getattr(kd, name) is not None:
                raise MkdConfigError(
                    f"{flag_of(name)} is {getattr(kd, name)}, which is for a teacher with a different tokenizer: give "
                    "--kd-xtoken-loss, or leave it out"
                )
        return
    require_choice("--kd-xtoken-loss", kd.xtoken_loss, get_args(XTokenLoss))
    length = kd.teacher_seq_length
    if length is not None and length < 1:
        raise MkdConfigError(f"--kd-teacher-seq-length is {length}; it must be at least 1")
    reasons = {
        "--kd-hidden-loss": (kd.hidden_loss, "its hidden states belong to other tokens"),
        "--kd-teacher-cache": (kd.teacher_cache, "a cache has targets for the student's own tokens"),
    }
    for flag, (value, reason) in reasons.items():
        if value is not None:
            raise MkdConfigError(
                f"--kd-xtoken-loss is {kd.xtoken_loss}, for a teacher with a different tokenizer: {flag} {value} does "
                f"not work with it ({reason})"
            )
    if kd.loss_impl == "reference":
        raise MkdConfigError("--kd-loss-impl reference does not have --kd-xtoken-loss: give auto, eager or triton")


def check_comparison(kd: KDFields) -> None:
    """Refuse --kd-compare-interval where the teacher is not run."""
    if kd.compare_interval is not None and kd.is_plain_pretraining:
        raise MkdConfigError(
            f"--kd-compare-interval is {kd.compare_interval}, but at R = 0 the teacher is not run: leave it out"
        )
