"""Checks of the --kd-* flags against each other; none of them reads a file."""

import math
import re
from typing import get_args

from mkd.config.bounds import BOUNDS, check_number
from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.loss_spec import SKEWED, Divergence, LossSpec
from mkd.config.schedules import Schedule
from mkd.config.values import (
    BadRecordsMode,
    BestMetric,
    CutOffMode,
    DataFormat,
    GuardMode,
    HiddenLossType,
    LogitsDtype,
    LossImplementation,
    Packing,
    RolloutApi,
    ServedTargets,
    SignalsMemory,
    TeacherApi,
    TeachersMode,
    XTokenLoss,
    require_choice,
    require_ratio,
    require_temperature,
)
from mkd.errors import MkdConfigError
from mkd.utils.logging import LogLevel

_PASSWORD = re.compile(r"//[^/]*:[^/]*@")
"""User and password in a URI."""

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


SERVED_FIELDS = (
    *("teacher_ahead", "teacher_buffer_gb", "teacher_timeout", "teacher_tokenizer", "teacher_targets"),
    *("teacher_samples", "teacher_states_dir", "teacher_head_hf"),
)
"""Fields of teachers behind --kd-teacher-url."""


def check_served(kd: KDFields) -> None:
    """Refuse flags of a teacher on the student's ranks together with a service, and flags of a service without one."""
    if kd.teacher_url is None:
        for name in (*SERVED_FIELDS, "teacher_api"):
            if (value := getattr(kd, name)) != getattr(KDFields, name):
                text = " ".join(value) if isinstance(value, list) else value
                raise MkdConfigError(
                    f"{flag_of(name)} is {text}, but no teacher is served: give --kd-teacher-url, or leave it out"
                )
        return
    for flag, given, reason in (
        ("--kd-hidden-loss", kd.hidden_loss is not None, "a service sends final hidden states only"),
        (
            "--kd-xtoken-loss",
            kd.xtoken_loss is not None and kd.uses_inference_server,
            "an inference server reads the student's tokens",
        ),
        ("--kd-teacher-dtype", kd.teacher_dtype is not None, "give it to mkd serve-teacher"),
        ("--kd-teacher-offload", kd.teacher_offload, "no weights of the teacher are in memory"),
    ):
        if given:
            raise MkdConfigError(
                f"{flag} does not work with --kd-teacher-url {' '.join(kd.teacher_url)}: {reason}; leave it out"
            )
    if (kd.xtoken_loss is None) != (kd.teacher_tokenizer is None):
        given = f"--kd-xtoken-loss is {kd.xtoken_loss}"
        missing = "--kd-teacher-tokenizer DIR, the folder with the tokenizer of the served teacher"
        if kd.xtoken_loss is None:
            given, missing = f"--kd-teacher-tokenizer is {' '.join(kd.teacher_tokenizer)}", "--kd-xtoken-loss"
        raise MkdConfigError(f"{given}, which needs {missing}: give it, or leave the first out")
    if len(set(kd.teacher_url)) < len(kd.teacher_url):
        raise MkdConfigError(f"--kd-teacher-url {' '.join(kd.teacher_url)} has an address twice: leave one out")


def check_inference_server(kd: KDFields) -> None:
    """Refuse what an inference server (vLLM, SGLang) does not have, and addresses of both kinds."""
    require_choice("--kd-teacher-api", kd.teacher_api, get_args(TeacherApi))
    if kd.teacher_url is None:
        return
    urls = " ".join(kd.teacher_url)
    if len({url.startswith(("tcp://", "ipc://")) for url in kd.teacher_url}) > 1:
        raise MkdConfigError(
            f"--kd-teacher-url {urls} has addresses of two kinds: give tcp and ipc addresses, or http addresses"
        )
    if not kd.uses_inference_server:
        if kd.teacher_api not in ("auto", "mkd"):
            raise MkdConfigError(
                f"--kd-teacher-api is {kd.teacher_api}, but --kd-teacher-url {urls} is not an http address: give "
                "http://HOST:PORT, or leave it out"
            )
        return
    given, temperature = f"--kd-teacher-url {urls}", kd.temperature_over_time
    if kd.teacher_api == "mkd":
        raise MkdConfigError(
            f"--kd-teacher-api is mkd, but {given} is an inference server: give tcp://HOST:PORT or "
            "ipc:///FOLDER/NAME of mkd serve-teacher"
        )
    if kd.is_plain_pretraining:
        return
    if kd.uses_states_of_server:
        return
    if kd.top_k is None:
        raise MkdConfigError(
            f"{given} is an inference server, which returns the most probable tokens only: give their number as "
            "--kd-top-k K (the server must allow it: vllm serve --max-logprobs K), or --kd-teacher-states-dir for "
            "hidden states of vLLM"
        )
    if kd.cache_missing != "error":
        raise MkdConfigError(
            f"--kd-cache-missing is {kd.cache_missing}, but texts that are missing are sent to {given}: leave it out"
        )
    if kd.top_k_tail == "bucket" and (temperature.start, temperature.end) != (1.0, 1.0):
        raise MkdConfigError(
            f"the temperature is {temperature}, but {given} returns the mass of the tail at T = 1 only: give "
            "--kd-temperature 1, or --kd-top-k-tail renormalize"
        )


def check_states_of_server(kd: KDFields) -> None:
    """Refuse one of the folders of hidden states without the other, and hidden states of other teachers than vLLM."""
    folder, head = kd.teacher_states_dir, kd.teacher_head_hf
    if kd.teacher_url is None or (folder is None and head is None):
        return
    given = f"--kd-teacher-states-dir is {folder}"
    if None in (folder, head):
        raise MkdConfigError(
            f"{given}, and --kd-teacher-head-hf is {head}: give both, or leave both out. The first is the folder to "
            "which vLLM writes hidden states, the second the Hugging Face folder of the served model"
        )
    if not kd.uses_inference_server or kd.teacher_api == "sglang":
        other = f"--kd-teacher-url {' '.join(kd.teacher_url)}" if kd.teacher_api != "sglang" else "SGLang"
        raise MkdConfigError(f"{given}, which works with http addresses of vLLM, not with {other}: leave it out")
    if kd.teacher_cache is not None:
        raise MkdConfigError(
            f"{given}, and --kd-teacher-cache is {kd.teacher_cache}: caches have no hidden states; leave one out"
        )


def check_served_targets(kd: KDFields) -> None:
    """Refuse targets of a service where they are not enough for the loss, and with an inference server."""
    require_choice("--kd-teacher-targets", kd.teacher_targets, get_args(ServedTargets))
    is_sampled, given = kd.teacher_targets == "sampled", f"--kd-teacher-targets is {kd.teacher_targets}"
    if is_sampled != (kd.teacher_samples is not None):
        raise MkdConfigError(
            f"{given}, and --kd-teacher-samples is {kd.teacher_samples}: give --kd-teacher-targets sampled with "
            "--kd-teacher-samples N, or neither"
        )
    if kd.teacher_targets == "hidden_states" or kd.teacher_url is None:
        return
    temperature = kd.temperature_over_time
    is_constant = temperature.start == temperature.end
    if kd.uses_inference_server:
        raise MkdConfigError(
            f"{given}, which is for services of mkd, and {kd.teacher_url[0]} returns the most probable tokens always: "
            "leave it out"
        )
    if kd.teachers_mode == "averaged_logits":
        raise MkdConfigError(
            f"{given}, but --kd-teachers-mode averaged_logits needs all logits of each teacher: leave one of them out"
        )
    if is_sampled:
        _check_served_samples(kd, given)
    elif kd.top_k is None:
        raise MkdConfigError(f"{given}, but their number is not given: give --kd-top-k K, or leave it out")
    if not is_constant and (is_sampled or kd.top_k_tail == "bucket"):
        remedy = "" if is_sampled else ", or --kd-top-k-tail renormalize"
        raise MkdConfigError(
            f"{given}, but the temperature is {temperature}, and the service computes them at one temperature: give a "
            f"constant --kd-temperature{remedy}"
        )


def _check_served_samples(kd: KDFields, given: str) -> None:
    """Refuse what a loss of samples does not have."""
    if kd.loss != "forward_kl":
        raise MkdConfigError(f"{given}, which estimate forward_kl only, not --kd-loss {kd.loss}: leave one of them out")
    for flag, value in (("--kd-top-k", kd.top_k), ("--kd-xtoken-loss", kd.xtoken_loss)):
        if value is not None:
            raise MkdConfigError(f"{given}, which does not work with {flag} {value}: leave one of them out")


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


NUMBERS = tuple(name.removeprefix("kd_") for name in BOUNDS if name.startswith("kd_"))
"""Fields that are numbers with bounds."""

CHOICES = {
    "logits_dtype": get_args(LogitsDtype),
    "loss_impl": get_args(LossImplementation),
    "data_format": get_args(DataFormat),
    "bad_records": get_args(BadRecordsMode),
    "packing": get_args(Packing),
    "long_samples": ("split", "drop"),
    "mask": ("labels", "all"),
    "rollout_cut_off": get_args(CutOffMode),
    "rollout_guard": get_args(GuardMode),
    "log_level": get_args(LogLevel),
    "teacher_signals": get_args(SignalsMemory),
}
"""Field -> its values, for fields without other checks."""


def check_choice(kd: KDFields, field: str) -> None:
    """Refuse a value that is not among `CHOICES`."""
    require_choice(flag_of(field), getattr(kd, field), CHOICES[field])


def check_at_least_one(kd: KDFields, field: str) -> None:
    """Refuse a number below 1."""
    value = getattr(kd, field)
    if value is not None and value < 1:
        raise MkdConfigError(f"{flag_of(field)} is {value}; it must be at least 1")


def check_bounds(kd: KDFields, field: str) -> None:
    """Refuse a number outside the bounds of `mkd.config.bounds`."""
    value = getattr(kd, field)
    for number in value if isinstance(value, list) else [value]:
        if number is not None:
            check_number(flag_of(field), f"kd_{field}", number)


def check_lengths(kd: KDFields) -> None:
    """Refuse microbatches of different lengths with packed rows."""
    if kd.variable_seq_lengths and kd.packing != "none":
        raise MkdConfigError(
            f"--kd-variable-seq-lengths does not work with --kd-packing {kd.packing}: packed rows have one length"
        )


def check_snapshots_kept(kd: KDFields) -> None:
    """Refuse --kd-save-hf-keep without --kd-save-hf-interval."""
    if kd.save_hf_keep is not None and kd.save_hf_interval is None:
        raise MkdConfigError(
            f"--kd-save-hf-keep is {kd.save_hf_keep}, but no Hugging Face folders are written: give "
            "--kd-save-hf-interval, or leave it out"
        )


def check_keep_best(kd: KDFields) -> None:
    """Refuse --kd-keep-best by an accuracy that is not measured."""
    if kd.keep_best is None:
        return
    require_choice("--kd-keep-best", kd.keep_best, get_args(BestMetric))
    if kd.keep_best == "accuracy" and kd.eval_tasks is None:
        raise MkdConfigError("--kd-keep-best is accuracy, which is measured with --kd-eval-tasks only: give its file")


def check_epochs(kd: KDFields) -> None:
    """Refuse a number of epochs that is not finite and above 0."""
    if kd.epochs is not None and not (math.isfinite(kd.epochs) and kd.epochs > 0.0):
        raise MkdConfigError(f"--kd-epochs is {kd.epochs:g}; it must be a finite number > 0")


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


def check_lora(kd: KDFields) -> None:
    """Refuse --kd-lora without a student's folder or with another form, and its options without it."""
    if kd.lora is None:
        if kd.lora_modules is not None:
            raise MkdConfigError(
                f"--kd-lora-modules is {' '.join(kd.lora_modules)}, but there are no adapters: give --kd-lora, or "
                "leave it out"
            )
        return
    assert kd.lora_options is not None
    if kd.student_hf is None:
        raise MkdConfigError(
            f"--kd-lora is {kd.lora}, but there are no weights to freeze: give the student's Hugging Face folder in "
            "--kd-student-hf"
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


def check_comparison(kd: KDFields) -> None:
    """Refuse --kd-compare-interval where the teacher is not run."""
    if kd.compare_interval is not None and kd.is_plain_pretraining:
        raise MkdConfigError(
            f"--kd-compare-interval is {kd.compare_interval}, but at R = 0 the teacher is not run: leave it out"
        )


def check_mlflow(kd: KDFields) -> None:
    """Refuse --kd-mlflow-uri without --kd-mlflow-experiment, or with a password, which everyone on the machine and
    every reader of the checkpoints would see."""
    if kd.mlflow_uri is not None and _PASSWORD.search(kd.mlflow_uri):
        raise MkdConfigError(
            "--kd-mlflow-uri has a password: command lines, checkpoints and kd_config.json are not the place for one; "
            "set the environment variable MLFLOW_TRACKING_URI instead, and leave the flag out"
        )
    if kd.mlflow_uri is not None and kd.mlflow_experiment is None:
        raise MkdConfigError(
            f"--kd-mlflow-uri is {kd.mlflow_uri}, but nothing is written to MLflow: give --kd-mlflow-experiment, or "
            "leave it out"
        )


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
