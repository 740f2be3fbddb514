"""Texts that the student writes: --kd-on-policy, samples, and answers to tasks."""

from typing import get_args

from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.values import RolloutApi, require_choice
from mkd.errors import MkdConfigError

SERVER_FIELDS = ("rollout_api", "rollout_refresh", "rollout_weights", "rollout_timeout")
"""Fields of servers behind --kd-rollout-url."""

ROLLOUT_FIELDS = (
    "prompts",
    "rollout_tokens",
    "rollout_temperature",
    "rollout_top_p",
    "rollout_samples",
    "rollout_stop",
    "rollout_cut_off",
    "rollout_steps",
    "rollout_memory_gb",
    "rollout_offload",
    "rollout_url",
    *SERVER_FIELDS,
    "rollout_guard",
    "rollout_most_repeated",
    "rollout_most_cut_off",
    "position_weight",
)
"""Fields that only texts of --kd-on-policy use."""


def check_on_policy(kd: KDFields) -> None:
    """Refuse --kd-on-policy without prompts or with what does not work with it, and its options without it."""
    if not kd.is_on_policy:
        for field in ROLLOUT_FIELDS:
            if (value := getattr(kd, field)) != getattr(KDFields, field, None):
                text = " ".join(map(repr, value)) if isinstance(value, list) else value
                raise MkdConfigError(
                    f"{flag_of(field)} is {text}, but the student writes nothing: give --kd-on-policy, or leave it out"
                )
        return
    _check_share(kd)
    _check_servers(kd)
    what = f"L = {kd.on_policy_over_time} of --kd-on-policy"
    if kd.on_policy_schedule == "constant":
        what = f"--kd-on-policy is {kd.on_policy:g}"
    if kd.prompts is None:
        raise MkdConfigError(f"{what}, but there are no prompts: give --kd-prompts FILE")
    if kd.rollout_stop is not None and not all(kd.rollout_stop):
        raise MkdConfigError("--kd-rollout-stop has an empty string, which ends every text at once: leave it out")
    if (damaged := next((text for text in kd.rollout_stop or () if not _is_utf8(text)), None)) is not None:
        raise MkdConfigError(f"--kd-rollout-stop has {damaged!r}, which is not UTF-8: no text contains it")
    if kd.rollout_top_p < 1.0 and kd.rollout_temperature == 0.0:
        raise MkdConfigError(
            f"--kd-rollout-top-p is {kd.rollout_top_p:g}, but at --kd-rollout-temperature 0 nothing is sampled: leave "
            "one of them out"
        )
    for field in ("rollout_most_repeated", "rollout_most_cut_off"):
        if kd.rollout_guard == "off" and (value := getattr(kd, field)) != getattr(KDFields, field):
            raise MkdConfigError(f"{flag_of(field)} is {value:g}, but --kd-rollout-guard is off: leave one of them out")
    if kd.rollout_samples > 1 and kd.rollout_temperature == 0.0:
        raise MkdConfigError(
            f"--kd-rollout-samples is {kd.rollout_samples}, but at --kd-rollout-temperature 0 all answers to a prompt "
            "are the same: leave one of them out"
        )
    largest = max(kd.on_policy_over_time.start, kd.on_policy_over_time.end)
    reasons = {
        "--kd-ratio 0": (kd.is_plain_pretraining, "the teacher is not run"),
        "--kd-teacher-cache": (kd.teacher_cache is not None, "it has no targets of texts that are not written yet"),
        "--kd-balance": (kd.balance and largest == 1.0, "where all texts are written, there is no cross-entropy"),
    }
    for flag, (given, reason) in reasons.items():
        if given:
            raise MkdConfigError(f"{what}, which does not work with {flag} ({reason}): leave one of them out")


def _is_utf8(text: str) -> bool:
    """False for bytes of a command line that are not UTF-8, and halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _check_servers(kd: KDFields) -> None:
    """Refuse options of servers without --kd-rollout-url, and what does not work with it."""
    require_choice("--kd-rollout-api", kd.rollout_api, get_args(RolloutApi))
    if kd.rollout_url is None:
        for field in SERVER_FIELDS:
            if (value := getattr(kd, field)) != getattr(KDFields, field):
                raise MkdConfigError(
                    f"{flag_of(field)} is {value}, but the student writes on the training ranks: give "
                    "--kd-rollout-url, or leave it out"
                )
        return
    what = f"--kd-rollout-url {' '.join(kd.rollout_url)}"
    if len(set(kd.rollout_url)) < len(kd.rollout_url):
        raise MkdConfigError(f"{what} has an address twice: leave one out")
    for flag, given, reason in (
        ("--kd-rollout-memory-gb", kd.rollout_memory_gb is not None, "nothing is cached on the training ranks"),
        ("--kd-rollout-offload", kd.rollout_offload, "nothing is cached on the training ranks"),
        ("--kd-lora", kd.lora is not None, "servers load whole weights"),
    ):
        if given:
            raise MkdConfigError(f"{what} does not work with {flag} ({reason}): leave one of them out")


def _check_share(kd: KDFields) -> None:
    """Refuse an L that is given twice, outside [0, 1], or 0 throughout."""
    if kd.on_policy_schedule == "constant":
        return
    if kd.on_policy is not None:
        raise MkdConfigError(
            f"--kd-on-policy {kd.on_policy:g} and --kd-on-policy-schedule {kd.on_policy_schedule} both set L: give one "
            "of them"
        )
    share = kd.on_policy_over_time
    for name, value in (("START", share.start), ("END", share.end)):
        if not 0.0 <= value <= 1.0:
            raise MkdConfigError(f"{name} of --kd-on-policy-schedule is {value:g}; it is a share and must be in [0, 1]")
    if share.start == share.end == 0.0:
        raise MkdConfigError(
            f"--kd-on-policy-schedule is {kd.on_policy_schedule}, where L is 0 for the whole run: leave it out"
        )


def check_samples(kd: KDFields) -> None:
    """Refuse --kd-sample-tokens without --kd-sample-prompts."""
    if kd.sample_prompts is None and kd.sample_tokens != KDFields.sample_tokens:
        raise MkdConfigError(
            f"--kd-sample-tokens is {kd.sample_tokens}, but no samples are written: give --kd-sample-prompts, or leave "
            "it out"
        )


def check_eval_tokens(kd: KDFields) -> None:
    """Refuse --kd-eval-tokens without --kd-eval-tasks."""
    if kd.eval_tasks is None and kd.eval_tokens != KDFields.eval_tokens:
        raise MkdConfigError(
            f"--kd-eval-tokens is {kd.eval_tokens}, but no tasks are answered: give --kd-eval-tasks, or leave it out"
        )
