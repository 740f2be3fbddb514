"""Teachers behind --kd-teacher-url: services of mkd, and inference servers."""

from typing import get_args

from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.values import ServedTargets, TeacherApi, require_choice
from mkd.errors import MkdConfigError

SERVED_FIELDS = (
    *("teacher_ahead", "teacher_buffer_gb", "teacher_timeout", "teacher_tokenizer", "teacher_targets"),
    *("teacher_samples", "teacher_states_dir", "teacher_head_hf"),
)
"""Fields of teachers behind --kd-teacher-url."""
_SCHEMES = ("http://", "https://", "tcp://", "ipc://")


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
    for url in kd.teacher_url:
        if not url.startswith(_SCHEMES):
            raise MkdConfigError(
                f"--kd-teacher-url {url} begins with none of {', '.join(_SCHEMES)}: give http://HOST:PORT for vLLM or "
                "SGLang, or tcp://HOST:PORT or ipc:///FOLDER/NAME for mkd serve-teacher"
            )
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
