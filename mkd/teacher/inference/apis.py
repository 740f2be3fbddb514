"""The requests and answers of vLLM and of SGLang: token ids in, token ids and log-probabilities out, never text."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from mkd.errors import MkdTeacherError
from mkd.teacher.inference.http import HttpServer
from mkd.teacher.inference.scores import TokenScores

_ENTRY_BYTES = 400
"""One entry of an answer, with the text of its token, at most on average over an answer; about 70 are usual."""
_FIXED_BYTES = 1 << 20


class _Malformed(Exception):
    """An answer of another form; the message names the difference."""


class InferenceApi(Protocol):
    """Protocol of a server."""

    name: str
    """Value of --kd-teacher-api."""
    remedy: str
    """Command that starts a server for {top_k} tokens per position and texts of {length} tokens, for messages."""

    def path(self) -> str:
        """Path of the requests below the address."""
        ...

    def body(self, model: str, text: Sequence[int], top_k: int) -> Mapping[str, Any]:
        """The request for a text."""
        ...

    def read(self, answer: Any, text: Sequence[int], top_k: int) -> TokenScores:
        """The scores in an answer, whose shape is checked; `TokenScores.check` checks the values.

        Raises:
            _Malformed: anything is missing, or of another number or type.
        """
        ...


def score(
    api: InferenceApi, server: HttpServer, model: str, text: Sequence[int], top_k: int, vocab: int
) -> TokenScores:
    """Request the scores of a text.

    Args:
        api: its protocol.
        server: the server.
        model: the name that it serves the model under.
        text: token ids, at least two.
        top_k: number of the most probable tokens per position.
        vocab: size of the vocabulary.

    Raises:
        ServerLost: the server does not answer now.
        MkdTeacherError, MkdNumericError: its answer cannot be used.
    """
    answer = send(api, server, api.body(model, text, top_k), (top_k + 2) * len(text))
    return scores_in(answer, api, server, text, top_k, vocab)


def send(api: InferenceApi, server: HttpServer, body: Mapping[str, Any], entries: int) -> Any:
    """Send a request; returns the answer, of at most `entries` entries.

    Raises:
        ServerLost: the server does not answer now.
        MkdTeacherError: it refuses the request, or its answer is not JSON.
    """
    content = json.dumps(body, separators=(",", ":")).encode()
    return server.post(api.path(), content, _FIXED_BYTES + _ENTRY_BYTES * entries)


def scores_in(
    answer: Any, api: InferenceApi, server: HttpServer, text: Sequence[int], top_k: int, vocab: int
) -> TokenScores:
    """The scores in an answer, checked; see `score`."""
    with wrong_form(api, server):
        scores = api.read(answer, text, top_k)
    scores.check(np.asarray(text), vocab, str(server))
    return scores


@contextmanager
def wrong_form(api: InferenceApi, server: HttpServer) -> Iterator[None]:
    """Errors inside, of an answer of another form, become an MkdTeacherError that names the server."""
    try:
        yield
    except _Malformed as error:
        raise MkdTeacherError(f"{server} answers {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MkdTeacherError(
            f"{server} answers in another form than {api.name} does ({type(error).__name__}: {error}): is "
            f"{server.flags.api} right?"
        ) from None


class VllmApi:
    """vLLM: POST /v1/completions with `prompt_logprobs`.

    The entries of a position are an object with a member per token: the token of the text first, then ranks 1 to K.
    If the former is among the latter there are K members, else K + 1.
    """

    name = "vllm"
    remedy = "vllm serve MODEL --max-logprobs {top_k} --max-model-len {length} --logprobs-mode raw_logprobs"

    def path(self) -> str:
        """See `InferenceApi`."""
        return "/v1/completions"

    def body(self, model: str, text: Sequence[int], top_k: int) -> Mapping[str, Any]:
        """See `InferenceApi`."""
        return {
            "model": model,
            "prompt": list(text),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
            "add_special_tokens": False,
            "return_token_ids": True,
        }

    def read(self, answer: Any, text: Sequence[int], top_k: int) -> TokenScores:
        """See `InferenceApi`."""
        (choice,) = answer["choices"]
        echo, entries = choice.get("prompt_token_ids"), choice["prompt_logprobs"]
        if echo is not None:
            require_same_text(echo, text)
        if entries is None:
            raise _Malformed("without prompt_logprobs: it cannot score texts; is it vLLM?")
        _require_length(len(entries), text, entries[0])
        ids, log_probs, own = [], [], np.empty(len(text) - 1)
        for position, (token, members) in enumerate(zip(text[1:], entries[1:], strict=True)):
            scored = {int(key): member["logprob"] for key, member in members.items()}
            if token not in scored:
                raise _Malformed(f"for other tokens than those sent: it lacks token {token} at position {position + 1}")
            own[position] = scored[token]
            if len(scored) == top_k + 1:
                del scored[token]
            _require_count(len(scored), top_k, position + 1)
            ordered = sorted(scored.items(), key=lambda item: -item[1])
            ids += (one for one, _ in ordered)
            log_probs += (value for _, value in ordered)
        return _scores(ids, log_probs, own, top_k)


class SglangApi:
    """SGLang: POST /generate with `return_logprob`; each entry is [log-probability, id, text or null]."""

    name = "sglang"
    remedy = "python -m sglang.launch_server --model-path MODEL --context-length {length}"

    def path(self) -> str:
        """See `InferenceApi`."""
        return "/generate"

    def body(self, model: str, text: Sequence[int], top_k: int) -> Mapping[str, Any]:
        """See `InferenceApi`."""
        return {
            "input_ids": list(text),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
            "return_text_in_logprobs": False,
            "stream": False,
        }

    def read(self, answer: Any, text: Sequence[int], top_k: int) -> TokenScores:
        """See `InferenceApi`."""
        meta = answer["meta_info"]
        own, top = meta["input_token_logprobs"], meta["input_top_logprobs"]
        first, *own = own
        _require_length(1 + len(own), text, None if first is None else first[0])
        require_same_text([text[0] if first is None else first[1], *(entry[1] for entry in own)], text)
        _require_length(len(top), text, top[0])
        ids, log_probs = [], []
        for position, entries in enumerate(top[1:], start=1):
            _require_count(len(entries), top_k, position)
            ordered = sorted(entries, key=lambda entry: -entry[0])
            ids += (entry[1] for entry in ordered)
            log_probs += (entry[0] for entry in ordered)
        return _scores(ids, log_probs, np.array([entry[0] for entry in own], dtype=np.float64), top_k)


APIS: Mapping[str, Callable[[], InferenceApi]] = {"vllm": VllmApi, "sglang": SglangApi}
"""Value of --kd-teacher-api -> its protocol."""


def _scores(ids: Iterable[Any], log_probs: Iterable[Any], own: np.ndarray, top_k: int) -> TokenScores:
    # A null is NaN in an array of floats, and an id that is not an integer is an error here.
    found = np.array(list(ids))
    if found.dtype.kind not in "iu":
        raise _Malformed("with token ids that are not integers")
    return TokenScores(
        found.astype(np.int64).reshape(-1, top_k), np.array(list(log_probs), dtype=np.float64).reshape(-1, top_k), own
    )


def require_same_text(echo: Sequence[int], text: Sequence[int]) -> None:
    """Refuse an answer to another text, inside `wrong_form`."""
    if list(echo) != list(text):
        raise _Malformed(
            f"for a text of {len(echo)} tokens; {len(text)} other ones were sent: it must neither cut texts nor add "
            "special tokens"
        )


def _require_length(count: int, text: Sequence[int], first: Any) -> None:
    if count != len(text):
        raise _Malformed(f"for {count} tokens, {len(text)} were sent: it must neither cut texts nor add special tokens")
    if first is not None:
        raise _Malformed("with a probability of the first token, which has no prefix: a special token is added")


def _require_count(count: int, top_k: int, position: int) -> None:
    if count != top_k:
        raise _Malformed(
            f"with {count} of the most probable tokens at position {position}; --kd-top-k {top_k} were requested"
        )
