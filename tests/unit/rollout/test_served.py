"""Texts that inference servers write: requests, answers and their faults, new weights, servers that are lost."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError, MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.rollout.interface import Decoding, Request
from mkd.rollout.served import server as server_module
from mkd.rollout.served import sharing
from mkd.rollout.served.apis import WRITING_APIS
from mkd.rollout.served.find import TextSizes, find_servers
from mkd.rollout.served.server import StudentServer, StudentWeights
from mkd.rollout.served.sharing import SharedTexts, Sharer
from mkd.rollout.served.text_files import TextFiles, rollout_key
from mkd.rollout.stop_strings import StopStrings
from mkd.teacher.inference.http import ROLLOUT, HttpServer, ServerAddress, ServerLost, pause_s
from tests.support.inference_server import StandIn, table_model

VOCAB, TOKENS, ENDS = 50, 9, frozenset({0, 1})
TEXT = (3, 14, 15, 9, 26, 5, 35, 8, 9, 7)
OPTIONS = Decoding(
    tokens=TOKENS, end_tokens=ENDS, true_vocab=VOCAB, rows=1, longest=32, temperature=0.7, top_p=0.95, seed=5
)
REQUESTS = [Request((number % VOCAB, 7, 9), sample=number) for number in range(16)]
FLAGS = (ROLLOUT.url, "--kd-rollout-timeout")


def model_in(folder: str) -> Any:
    """The model of a folder whose name is a seed."""
    return table_model(VOCAB, int(Path(folder).name))


def weights(number: int, model: Any = None) -> StudentWeights:
    found = (model or model_in(str(number)))(TEXT)[:-1]
    return StudentWeights(Path("/w") / str(number), number, TEXT, found[np.arange(len(found)), TEXT[1:]])


def started(api: str = "vllm", port: int = 0) -> StandIn:
    server = StandIn(model_in("0"), api, vocab=VOCAB, port=port)
    server.load = model_in
    return server


@pytest.fixture(params=list(WRITING_APIS))
def server(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    with started(request.param) as server:
        yield server


@pytest.fixture
def vllm() -> Iterator[StandIn]:
    with started() as server:
        yield server


def student_at(server: StandIn, timeout_s: float = 5.0) -> StudentServer:
    address = ServerAddress.parse(ROLLOUT.url, server.url)
    return StudentServer(
        HttpServer(address, timeout_s, len(REQUESTS), ROLLOUT), WRITING_APIS[server.api](), server.name, VOCAB
    )


def expected(model: Any, request: Request, seed: int, options: Decoding = OPTIONS) -> list[int]:
    """The text of the stand-in's sampler."""
    text, generator = list(request.prompt), np.random.default_rng(seed)
    for _ in range(options.tokens):
        chances = np.exp(model(text)[-1] / options.temperature)
        chances /= chances.sum()
        order = np.argsort(-chances)
        kept = order[: 1 + np.searchsorted(np.cumsum(chances[order]), options.top_p)]
        text.append(int(generator.choice(kept, p=chances[kept] / chances[kept].sum())))
        if text[-1] in options.end_tokens:
            break
    return text[len(request.prompt) :]


def test_texts_and_their_random_numbers(server: StandIn) -> None:
    """Each request has a seed of its own, and the same one each time; all options of sampling are in the request."""
    student = student_at(server)
    found = [student.write(request, OPTIONS) for request in (*REQUESTS[:8], *REQUESTS[:2])]
    assert found[:2] == found[-2:] and len(set(map(tuple, found))) == 8
    name = "seed" if server.api == "vllm" else "sampling_seed"
    seeds = [(body if server.api == "vllm" else body["sampling_params"])[name] for body in server.bodies]
    assert seeds[:2] == seeds[-2:] and len(set(seeds)) == 8 and 0 <= min(seeds) <= max(seeds) < 2**31
    assert found[:3] == [expected(server.model, *pair) for pair in zip(REQUESTS[:3], seeds, strict=False)]
    assert {text[-1] in ENDS for text in found} == {True, False}
    assert {len(text) for text in found if text[-1] not in ENDS} == {TOKENS}
    greedy = student.write(REQUESTS[0], replace(OPTIONS, temperature=0.0, top_p=1.0))
    assert greedy[0] == server.model([0, 7, 9])[-1].argmax()


VLLM_ANSWER = {
    "id": "cmpl-a2b38f9eba9598ca",
    "object": "text_completion",
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "text": " N E",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [34, 41],
            "prompt_token_ids": [5, 7, 9],
        }
    ],
    "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
}
"""An answer of vLLM 0.32 with other ids."""


def test_an_answer_of_vllm() -> None:
    assert WRITING_APIS["vllm"]().read(VLLM_ANSWER, (5, 7, 9)) == ([34, 41], "length")


FAULTS = {
    "beyond": "tokens from .* to 50, but the student's vocabulary has 50: is another model served there",
    "negative": "tokens from -1 ",
    "fractions": "token ids that are not integers",
    "more tokens": r"with 1\d tokens; at most 9 were requested \(--kd-rollout-tokens\)",
    "no tokens": "a text without tokens",
    "short": "cut off after 1 tokens; 9 were requested .*: start it with ",
    "early": "stops after 1 tokens without an end token of the student's tokenizer",
    "reason": "ends for the reason content_filter",
    "no ids": "without (token_ids|output_ids): mkd needs",
    "another prompt": "of 3 tokens with a text after another one, of [23] tokens: it must neither cut prompts",
    "two choices": "in another form than .*: is --kd-rollout-api right",
    "redirect": "redirects to 'http://127.0.0.2",
    "page": "something else than JSON",
    "deep": "something else than JSON",
    "endless": "more than .* bytes, which no answer to this request has",
    "key": "status 401: .*; set MKD_ROLLOUT_API_KEY to the key of the server",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_answers_that_cannot_be_used(server: StandIn, fault: str) -> None:
    server.fault = fault
    with pytest.raises(MkdTeacherError, match=FAULTS[fault]):
        for request in REQUESTS[:4]:
            student_at(server).write(
                request, replace(OPTIONS, end_tokens=frozenset()) if fault == "more tokens" else OPTIONS
            )


@pytest.mark.parametrize("fault", ["busy", "half", "aborts", "dead"])
def test_answers_that_are_requested_again(server: StandIn, fault: str) -> None:
    server.fault = fault
    with pytest.raises(ServerLost):
        student_at(server).write(REQUESTS[0], OPTIONS)


class Spelled:
    """A tokenizer whose tokens are letters."""

    is_fast = False

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(chr(97 + token) for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "found"), [("xyz", "xyz"), ("xbay", "xba"), ("xabyba", "xabyba"), ("babab", "ba"), ("xqbay", "xq")]
)
def test_the_first_end_counts(tokens: str, found: str) -> None:
    """A server may write beyond a stop string that its own detokenizer notices late."""
    ids = [ord(letter) - 97 for letter in tokens]
    options = replace(OPTIONS, stops=StopStrings(("ba",), Spelled()), end_tokens=frozenset({16}))
    assert Spelled().decode(options.up_to_end(ids)) == found


def test_new_weights(server: StandIn) -> None:
    """They are loaded once, and again after the server was started with others."""
    student, first, second = student_at(server), weights(1), weights(2)
    student.prepare(first)
    student.prepare(first)
    student.verify()
    student.prepare(second)
    assert server.loaded == ["/w/1", "/w/2"]
    server.model = model_in("1")
    with pytest.raises(ServerLost, match="has other weights than it had loaded"):
        student.verify()
    student.prepare(second)
    student.verify()
    assert server.loaded == ["/w/1", "/w/2", "/w/2"] and np.array_equal(server.model(TEXT), model_in("2")(TEXT))


def test_weights_that_are_not_the_students(server: StandIn) -> None:
    server.fault = "keeps"
    with pytest.raises(MkdTeacherError) as error:
        student_at(server).prepare(weights(1))
    words = [f"--kd-rollout-url {server.url} has other weights than the student", "/w/1", "nats on average (limit 0."]
    assert [word for word in (*words, "serve the student's own model") if word not in str(error.value)] == []


def nearby(share: float) -> Any:
    """A model that differs a little from model 1."""
    one, two = model_in("1"), model_in("2")

    def log_probs(ids: Sequence[int]) -> np.ndarray:
        mixed = (1.0 - share) * one(ids) + share * two(ids)
        return mixed - np.log(np.exp(mixed).sum(axis=1, keepdims=True))

    return log_probs


def test_a_server_that_keeps_weights_like_the_students(vllm: StandIn) -> None:
    """Their log-probabilities differ by less than rounding may; that they are bit-equal to before shows it."""
    student = student_at(vllm)
    student.prepare(weights(1))
    vllm.fault = "keeps"
    student.prepare(weights(1, nearby(1e-5)))  # too little to be sure
    with pytest.raises(MkdTeacherError, match=r"kept its weights: .* changed by 0.0\d+ nats .* since the weights of"):
        student.prepare(weights(1, nearby(0.01)))


def test_small_changes_add_up(vllm: StandIn) -> None:
    """A server that keeps its weights is found although each step changes them less than the limit."""
    student = student_at(vllm)
    student.prepare(weights(1))
    vllm.fault = "keeps"
    with pytest.raises(MkdTeacherError, match=r"kept its weights: .* since the weights of iteration 1, "):
        for step in range(1, 9):
            student.prepare(weights(1, nearby(5e-5 * step)))
    assert len(vllm.loaded) > 3


def test_a_server_that_loads_a_part(vllm: StandIn) -> None:
    """A tied LM head that is not loaded, for example: far below what rounding may make elsewhere."""
    student, parts = student_at(vllm), {"1": 0.0, "2": 0.004, "3": 0.003}
    vllm.load = lambda folder: nearby(parts[Path(folder).name])
    student.prepare(weights(1))
    student.prepare(replace(weights(1, nearby(0.004)), folder=Path("/w/2")))
    with pytest.raises(MkdTeacherError, match=r"has loaded a part of /w/3 only: .* by 0\.\d+ nats"):
        student.prepare(replace(weights(1, nearby(0.006)), folder=Path("/w/3")))


@pytest.mark.parametrize(("stale", "step", "noise"), [(7, 0.002, 1e-6), (1, 0.001, 0.012)])
def test_a_server_with_older_weights_whose_scores_are_not_bit_equal(
    vllm: StandIn, stale: int, step: float, noise: float
) -> None:
    """The student has changed by much more since the first weights than since the previous ones, or by less than ten
    times the rounding of the first ones."""

    def load(folder: str) -> Any:
        number = int(Path(folder).name)
        true = nearby(step * (stale if number == 8 else number))
        rounding = noise * np.random.default_rng(number).normal(size=(len(TEXT), VOCAB))
        return lambda ids: true(ids) + rounding

    def prepare(number: int) -> None:
        student.prepare(replace(weights(number, nearby(step * number)), folder=Path("/w") / str(number)))

    vllm.load, student = load, student_at(vllm)
    for number in range(1, 8):
        prepare(number)
    with pytest.raises(MkdTeacherError, match=rf"has older weights after it has loaded /w/8: .* of iteration {stale} "):
        prepare(8)


def test_rounding_at_first_bounds_rounding_later(vllm: StandIn) -> None:
    """Up to five times as much, and 3% of the log-probabilities: wide logits in bf16 need that."""
    student, shares = student_at(vllm), {"1": 0.02, "2": 0.03, "3": 0.2}
    vllm.load = lambda folder: nearby(shares[Path(folder).name])
    student.prepare(weights(1))
    student.prepare(replace(weights(2), folder=Path("/w/2"), scores=weights(1).scores))
    with pytest.raises(MkdTeacherError, match="has other weights than the student"):
        student.prepare(replace(weights(2), folder=Path("/w/3"), scores=weights(1).scores))


def test_a_server_whose_scores_change(vllm: StandIn) -> None:
    vllm.fault = "unsteady"
    student, same = student_at(vllm), weights(1)
    student._check = lambda *_: None
    with pytest.raises(MkdTeacherError, match="scores the same text differently each time"):
        for _ in range(6):
            student.prepare(same)


def test_log_probabilities_that_are_not_finite(vllm: StandIn) -> None:
    vllm.fault = "NaN"
    with pytest.raises(MkdNumericError, match="not finite: the weights of its model are damaged"):
        student_at(vllm).prepare(weights(1))


@pytest.mark.parametrize("fault", ["does not load", "busy cache"])
def test_weights_that_are_not_loaded(server: StandIn, fault: str) -> None:
    server.fault = fault
    if fault == "does not load":
        words = r"status [45]00: .*, when asked to load /w/1: it must find this folder under the same path"
        expectation = pytest.raises(MkdTeacherError, match=words)
    elif server.api == "sglang":
        return
    else:
        expectation = pytest.raises(ServerLost, match="does not reset its prefix cache")
    with expectation:
        student_at(server).prepare(weights(1))


def config(server: StandIn, query: str = "") -> KDConfig:
    return KDConfig(
        teacher_hf=["T"], ratio=1.0, on_policy=1.0, prompts="P", rollout_url=[server.url + query], rollout_timeout=5.0
    )


def test_finding_servers(server: StandIn) -> None:
    (found,) = find_servers(config(server, "/v1"), TextSizes(VOCAB, 40), 0.0)
    assert type(found.api) is WRITING_APIS[server.api] and (found.model, found.vocab) == ("t", VOCAB)
    assert server.loaded == [] and server.written == []


@pytest.mark.parametrize(
    ("change", "longest", "words"),
    [
        ({"load": None}, 40, "has no route /(collective_rpc|update_weights_from_disk), by which .*: start it with "),
        ({}, 64, "reads texts of 64 tokens; the longest prompt with --kd-rollout-tokens has 64.*: start it with "),
        ({"fault": "two models"}, 40, "serves the models t, adapter: give one as"),
        ({"fault": "no owner"}, 40, "give --kd-rollout-api vllm or sglang"),
    ],
)
def test_servers_that_are_refused(server: StandIn, change: dict[str, Any], longest: int, words: str) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises((MkdConfigError, MkdTeacherError), match=words):
        find_servers(config(server), TextSizes(VOCAB, longest), 0.0)


def test_no_server() -> None:
    with started() as server:
        kd = config(server)
    with pytest.raises(
        MkdTeacherTimeout, match=r"no inference server answers there within 0 s .*: start it, or correct"
    ):
        find_servers(kd, TextSizes(VOCAB, 40), 0.0)


@contextmanager
def shared(students: Sequence[StudentServer], target: StudentWeights) -> Iterator[SharedTexts]:
    sharers = [
        Sharer(str(one.server), partial(one.prepare, target), partial(one.write, options=OPTIONS), one.verify, one.turn)
        for one in students
    ]
    texts = SharedTexts(sharers, REQUESTS)
    try:
        yield texts
    finally:
        texts.close()


def wait(texts: SharedTexts, limit_s: float = 10.0) -> list[list[int]]:
    began = time.monotonic()
    while not all(answer.done() for answer in texts.answers):
        texts.check_silence(began, FLAGS, limit_s)
        time.sleep(0.005)
    return [answer.result() for answer in texts.answers]


@cache
def truth(number: int) -> list[list[int]]:
    with started() as server:
        server.model = model_in(str(number))
        return [student_at(server).write(request, OPTIONS) for request in REQUESTS]


def test_pauses_of_a_server_that_is_lost_for_days() -> None:
    assert [pause_s(failures, 0.25, 5.0) for failures in (1, 2, 5, 10**6)] == [0.5, 1.0, 5.0, 5.0]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_FIRST_PAUSE_S", 0.005)


def test_servers_share_texts_that_are_written_at_the_same_time() -> None:
    with started() as first, started("sglang") as second:
        first.delay_s = second.delay_s = 0.1
        with shared([student_at(first), student_at(second)], weights(1)) as texts:
            assert wait(texts) == truth(1)
        assert max(first.most_busy, second.most_busy) >= len(REQUESTS) // 4
        assert len(first.written) + len(second.written) == len(REQUESTS)
        assert min(len(first.written), len(second.written)) >= len(REQUESTS) // 4


def test_a_server_that_is_not_there() -> None:
    with started() as server:
        gone = started()
        gone.stop()
        with shared([student_at(gone), student_at(server)], weights(1)) as texts:
            assert wait(texts) == truth(1)
        assert len(server.written) == len(REQUESTS)


def test_a_server_that_is_started_again_with_other_weights() -> None:
    """Its answers are not used; it loads the weights, and the texts are sent again."""
    with started() as server:
        writes, student = 0, student_at(server)
        write = student.write

        def restarted(request: Request, options: Decoding) -> list[int]:
            nonlocal writes
            writes += 1
            if writes == 10:
                server.model = model_in("0")
            return write(request, options)

        student.write = restarted
        with shared([student], weights(1)) as texts:
            assert wait(texts) == truth(1)
        assert server.loaded == ["/w/1", "/w/1"] and len(server.written) == 2 * len(REQUESTS)


def test_a_server_that_is_killed_and_another_one() -> None:
    with started() as first, started() as second:
        first.delay_s = 0.02
        first.late_fault = (1, "dead")  # after the text that shows its weights
        with shared([student_at(first), student_at(second)], weights(1)) as texts:
            assert wait(texts) == truth(1)
        assert len(second.written) == len(REQUESTS)


def test_a_server_that_loads_longer_than_the_rollout_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rollout has it load newer weights only when it has loaded these, and does not wait for it."""
    monkeypatch.setattr(sharing, "_TURN_S", 0.01)
    with started() as slow, started() as quick:
        students, may_load = [student_at(slow), student_at(quick)], threading.Event()
        slow.load = lambda folder: (may_load.wait(5.0), model_in(folder))[1]
        for number in (1, 2):
            with shared(students, weights(number)) as texts:
                assert wait(texts) == truth(number)
        assert len(quick.written) == 2 * len(REQUESTS)
        with shared(students[:1], weights(3)) as texts:
            may_load.set()
            assert wait(texts) == truth(3)
        assert slow.loaded == ["/w/1", "/w/3"]


def test_a_server_that_aborts_texts_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_LONGEST_PAUSE_S", 0.005)
    with started() as server:
        server.fault = "aborts"
        with (
            shared([student_at(server)], weights(1)) as texts,
            pytest.raises(MkdTeacherError, match=r"sent 10 times without an answer: .* has aborted a text"),
        ):
            wait(texts)


def test_a_server_that_is_sick_beside_one_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts are sent again more than ten times, until the other server takes them."""
    monkeypatch.setattr(sharing, "_LONGEST_PAUSE_S", 0.005)
    lost, attempts = threading.Event(), 0

    def fail(request: Request) -> list[int]:
        raise ServerLost("500")

    def verify() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 30:
            lost.set()

    sick = Sharer("sick", lambda: None, fail, verify)
    well = Sharer("well", lambda: None, lambda request: [lost.wait(60.0)], lambda: None)
    texts = SharedTexts([sick, well], REQUESTS)
    assert wait(texts) == [[True]] * len(REQUESTS)
    texts.close()


def test_no_server_answers() -> None:
    with started() as server:
        server.fault = "busy"
        with (
            shared([student_at(server)], weights(1)) as texts,
            pytest.raises(MkdTeacherTimeout) as error,
        ):
            wait(texts, 0.2)
    words = [
        "no server of --kd-rollout-url has answered for 0 s (--kd-rollout-timeout 0.2",
        "status 503",
        "start one again",
    ]
    assert [word for word in words if word not in str(error.value)] == []


def test_an_answer_that_cannot_be_used_ends_the_rollout(vllm: StandIn) -> None:
    vllm.fault = "short"
    with (
        shared([student_at(vllm)], weights(1)) as texts,
        pytest.raises(MkdTeacherError, match="cut off after 1 tokens"),
    ):
        wait(texts)


def test_the_limits_have_their_order() -> None:
    """Weights are not loaded again because of rounding, and weights that are refused differ by more than rounding."""
    few, many = (replace(weights(1), scores=np.full(9, value)) for value in (-3.0, -20.0))
    assert server_module._MOVED_NATS < server_module._STEADY * few.limit < few.limit == server_module.SAME_NATS
    assert many.limit == pytest.approx(0.6)


def test_kept_texts(tmp_path: Path) -> None:
    """They are found for the same prompts, options and weights, and else as if there were none."""
    files, few, scores = TextFiles(tmp_path, 2), REQUESTS[:2], np.array([-1.0, -2.5])
    key = rollout_key(7, few, OPTIONS, scores)
    assert files.read(7, key, 2, OPTIONS) is None
    texts = [[3, 4, 0], [5] * TOKENS]
    files.write(7, key, texts, 6)
    assert files.read(7, key, 2, OPTIONS) == (texts, 6)
    others = [
        rollout_key(8, few, OPTIONS, scores),
        rollout_key(7, few[::-1], OPTIONS, scores),
        rollout_key(7, few, replace(OPTIONS, temperature=1.0), scores),
        rollout_key(7, few, replace(OPTIONS, seed=6), scores),
        rollout_key(7, few, OPTIONS, np.nextafter(scores, 0.0)),
    ]
    assert len({key, *others}) == 6 and [files.read(7, other, 2, OPTIONS) for other in others] == [None] * 5
    for damage in ([[3]], [[3], []], [[3], [VOCAB]], [[3], [1] * (TOKENS + 1)], [[3], [True]], [[3], "5"], None):
        files.write(7, key, damage or [], 6) if damage else (tmp_path / "texts_0000007.json").write_text("{")
        assert files.read(7, key, 2, OPTIONS) is None, damage
    for weights_at in (-1, 8):
        files.write(7, key, texts, weights_at)
        assert files.read(7, key, 2, OPTIONS) is None
    (tmp_path / "texts_0000007.json").write_text(" " * 10**6)
    assert files.read(7, key, 2, OPTIONS) is None
    (tmp_path / "texts_mine.json").touch()
    files.write(9, key, texts, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts_0000009.json", "texts_mine.json"]
