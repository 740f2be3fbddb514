"""The requests and answers of vLLM and SGLang for texts with token ids, and for new weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mkd.errors import MkdTeacherError
from mkd.rollout.engine.sampler import request_key
from mkd.rollout.interface import Decoding, Request
from mkd.teacher.inference.apis import InferenceApi, SglangApi, VllmApi
from mkd.teacher.inference.http import HttpServer, ServerLost, ServerRefusal

_TOKEN_BYTES = 400
"""One token of an answer, as id and text, at most on average over an answer."""
_FIXED_BYTES = 1 << 20
_SEED_BITS = 31
NO_ROUTE = 404
"""HTTP status of a server that has no such path."""
_FAILED = 500


class _Malformed(Exception):
    """An answer of another form; the message names the difference."""


class WritingApi(Protocol):
    """Protocol of a server."""

    scoring: InferenceApi
    """The protocol by which it scores texts."""
    remedy: str
    """Command that starts a server for texts of {length} tokens, for messages."""
    loading: str
    """Path of the request for new weights."""

    def path(self) -> str:
        """Path of the requests for texts."""
        ...

    def body(self, model: str, request: Request, options: Decoding, seed: int) -> Mapping[str, Any]:
        """The request for a text."""
        ...

    def read(self, answer: Any, prompt: Sequence[int]) -> tuple[list[Any], Any]:
        """The token ids in the answer to a prompt, and the reason for its end: `stop`, `length`, or another one.

        Raises:
            _Malformed: it has no ids, or is the answer to another prompt.
        """
        ...

    def load(self, server: HttpServer, folder: str) -> None:
        """Have the server load the weights in a folder and drop the keys and values of earlier weights.

        Raises:
            ServerLost: the server does not answer now.
            MkdTeacherError: it does not load them.
        """
        ...


def write_text(api: WritingApi, server: HttpServer, model: str, request: Request, options: Decoding) -> list[int]:
    """Request the continuation of a prompt, up to its first end.

    Args:
        api: the server's protocol.
        server: the server.
        model: the name under which it serves the model.
        request: the prompt.
        options: how tokens are sampled, and what ends a text.

    Raises:
        ServerLost: the server does not answer now, or has aborted the text.
        MkdTeacherError: its answer cannot be used.
    """
    # Servers take seeds of different sizes; all take this one.
    seed = request_key(request, options.seed) & ((1 << _SEED_BITS) - 1)
    body = json.dumps(api.body(model, request, options, seed), separators=(",", ":")).encode()
    answer = server.post(api.path(), body, _FIXED_BYTES + _TOKEN_BYTES * (len(request.prompt) + options.tokens))
    try:
        tokens, reason = api.read(answer, request.prompt)
        if not isinstance(tokens, list):
            raise _Malformed("without a list of token ids")
        return _checked(tokens, reason, server, api, options)
    except _Malformed as error:
        raise MkdTeacherError(f"{server} answers a prompt {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MkdTeacherError(
            f"{server} answers a prompt in another form than {api.scoring.name} does ({type(error).__name__}: "
            f"{error}): is {server.flags.api} right?"
        ) from None


def _checked(tokens: list[Any], reason: Any, server: HttpServer, api: WritingApi, options: Decoding) -> list[int]:
    """The tokens up to the first end."""
    if reason == "abort":
        raise ServerLost(f"{server} has aborted a text")
    if reason not in ("stop", "length"):
        raise _Malformed(f"with a text that ends for the reason {reason!s:.60}")
    if any(type(token) is not int for token in tokens):
        raise _Malformed("with token ids that are not integers")
    if not tokens:
        raise _Malformed("with a text without tokens")
    if len(tokens) > options.tokens:
        raise _Malformed(f"with {len(tokens)} tokens; at most {options.tokens} were requested (--kd-rollout-tokens)")
    if not 0 <= min(tokens) <= max(tokens) < options.true_vocab:
        raise _Malformed(
            f"with tokens from {min(tokens)} to {max(tokens)}, but the student's vocabulary has {options.true_vocab}: "
            "is another model served there?"
        )
    written = options.up_to_end(tokens)
    if options.ends(written):
        return written
    if reason == "stop":
        raise _Malformed(
            f"with a text that stops after {len(tokens)} tokens without an end token of the student's tokenizer or a "
            "string of --kd-rollout-stop: serve the student's own folder"
        )
    if len(tokens) < options.tokens:
        raise _Malformed(
            f"with a text that is cut off after {len(tokens)} tokens; {options.tokens} were requested "
            f"(--kd-rollout-tokens): start it with {api.remedy.format(length=options.longest + 1)}"
        )
    return written


def _load(server: HttpServer, path: str, body: Mapping[str, Any], folder: str, remedy: str) -> Any:
    """The answer to a request for new weights."""
    try:
        return server.post(path, json.dumps(body).encode(), _FIXED_BYTES)
    except ServerLost as error:
        if error.status != _FAILED:  # 503, for example: it is starting
            raise
        problem = error
    except ServerRefusal as error:
        if error.answer == NO_ROUTE:
            raise MkdTeacherError(f"{server.flags.url} {error}; {remedy}") from None
        problem = error
    raise MkdTeacherError(
        f"{server.flags.url} {problem}, when asked to load {folder}: it must find this folder under the same path "
        "(--kd-rollout-weights names another one), and serve the student's architecture"
    )


class VllmWriting:
    """vLLM: POST /v1/completions; new weights by /collective_rpc, which VLLM_SERVER_DEV_MODE=1 opens."""

    scoring = VllmApi()
    remedy = "VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --max-model-len {length} --generation-config vllm"
    loading = "/collective_rpc"

    def path(self) -> str:
        """See `WritingApi`."""
        return "/v1/completions"

    def body(self, model: str, request: Request, options: Decoding, seed: int) -> Mapping[str, Any]:
        """See `WritingApi`."""
        return {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": options.tokens,
            "seed": seed,
            "ignore_eos": True,  # all end tokens are in the list
            **_sampling(options),
            "add_special_tokens": False,
            "return_token_ids": True,
        }

    def read(self, answer: Any, prompt: Sequence[int]) -> tuple[list[Any], Any]:
        """See `WritingApi`."""
        (choice,) = answer["choices"]
        echo = choice.get("prompt_token_ids")
        if echo is not None and list(echo) != list(prompt):
            raise _another_prompt(len(echo), prompt)
        if "token_ids" not in choice:
            raise _Malformed("without token_ids: mkd needs vLLM 0.11 or later")
        return choice["token_ids"], choice["finish_reason"]

    def load(self, server: HttpServer, folder: str) -> None:
        """See `WritingApi`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        _load(server, self.loading, body, folder, "start it with VLLM_SERVER_DEV_MODE=1")
        answer = server.post("/reset_prefix_cache", b"{}", _FIXED_BYTES)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerLost(f"{server} does not reset its prefix cache: are texts of others being written there?")


class SglangWriting:
    """SGLang: POST /generate; new weights by /update_weights_from_disk, which empties its cache."""

    scoring = SglangApi()
    remedy = "python -m sglang.launch_server --model-path STUDENT --context-length {length}"
    loading = "/update_weights_from_disk"

    def path(self) -> str:
        """See `WritingApi`."""
        return "/generate"

    def body(self, model: str, request: Request, options: Decoding, seed: int) -> Mapping[str, Any]:
        """See `WritingApi`."""
        return {
            "input_ids": list(request.prompt),
            "sampling_params": {
                "max_new_tokens": options.tokens,
                "sampling_seed": seed,
                "ignore_eos": False,  # True would ignore the list, too
                "no_stop_trim": True,
                **_sampling(options),
            },
            "stream": False,
        }

    def read(self, answer: Any, prompt: Sequence[int]) -> tuple[list[Any], Any]:
        """See `WritingApi`."""
        meta = answer["meta_info"]
        reason, count = meta["finish_reason"], meta.get("prompt_tokens", len(prompt))
        if count != len(prompt):
            raise _another_prompt(count, prompt)
        if "output_ids" not in answer:
            raise _Malformed("without output_ids: mkd needs SGLang 0.5 or later")
        return answer["output_ids"], reason["type"]

    def load(self, server: HttpServer, folder: str) -> None:
        """See `WritingApi`."""
        answer = _load(server, self.loading, {"model_path": folder}, folder, "is it SGLang?")
        if not isinstance(answer, dict) or answer.get("success") is not True:
            message = answer.get("message") if isinstance(answer, dict) else answer
            raise MkdTeacherError(f"{server.flags.url} {server} does not load {folder}: {message!s:.300}")


def _another_prompt(count: Any, prompt: Sequence[int]) -> _Malformed:
    return _Malformed(
        f"of {len(prompt)} tokens with a text after another one, of {count!s:.20} tokens: it must neither cut prompts "
        "nor add special tokens, and nothing in between may mix answers"
    )


def _sampling(options: Decoding) -> dict[str, Any]:
    """Options of a text under the names of both servers. Those that are left out would have the values in the model's
    generation_config.json."""
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [] if options.stops is None else list(options.stops.strings),
        "stop_token_ids": sorted(options.end_tokens),
        "skip_special_tokens": False,
    }


WRITING_APIS: Mapping[str, Callable[[], WritingApi]] = {"vllm": VllmWriting, "sglang": SglangWriting}
"""Value of --kd-rollout-api -> its protocol."""
