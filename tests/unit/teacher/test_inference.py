"""Teachers behind vLLM and SGLang, with a stand-in for their protocols: answers, faults, retries, the cache."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdCacheError, MkdConfigError, MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.job.cache_build.inspect import merge
from mkd.job.teachers.cached import CachedTeacherSpec
from mkd.teacher.cache import writer as cache_writer
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.inference import http, texts
from mkd.teacher.inference import pool as pool_module
from mkd.teacher.inference.apis import APIS
from mkd.teacher.inference.http import HttpServer, ServerAddress, ServerLost, ServerRefusal, parse_addresses
from mkd.teacher.inference.known_text import NAME, KnownText, KnownTextFile
from mkd.teacher.inference.pool import ScoringPool, ServedModel
from mkd.teacher.inference.probe import SHORT, Probe, find_model
from mkd.teacher.inference.scores import TokenScores
from mkd.teacher.inference.texts import Text, TextStore
from tests.support.cached_targets import meta_of
from tests.support.inference_server import StandIn, table_model

VOCAB, TOP_K = 50, 5
MODEL = table_model(VOCAB)
META = meta_of(true_vocab=VOCAB, top_k=TOP_K, values="log12")
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
FLAG = "--kd-teacher-url"


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, StandIn]]:
    made = {api: StandIn(MODEL, api, vocab=VOCAB) for api in APIS}
    yield made
    for one in made.values():
        one.stop()


@pytest.fixture(params=list(APIS))
def server(servers: dict[str, StandIn], request: pytest.FixtureRequest) -> Iterator[StandIn]:
    yield from _clean(servers[request.param])


@pytest.fixture
def vllm(servers: dict[str, StandIn]) -> Iterator[StandIn]:
    yield from _clean(servers["vllm"])


def _clean(server: StandIn) -> Iterator[StandIn]:
    server.texts.clear()
    yield server
    server.fault, server.delay_s, server.tokens, server.model = "", 0.0, None, MODEL


def model_at(server: StandIn, timeout_s: float = 5.0) -> ServedModel:
    return ServedModel(HttpServer(ServerAddress.parse(FLAG, server.url), timeout_s, 8), APIS[server.api](), server.name)


def probe_of(**changes: Any) -> Probe:
    values = dict(
        text=tuple((7919 * n) % VOCAB for n in range(1, 4 * SHORT)), sentence=None, top_k=TOP_K, vocab=VOCAB,
        longest=40, flag=FLAG, timeout_s=0.0,
    )  # fmt: skip
    return Probe(**values | changes)


def compute(model: ServedModel, text: list[int]) -> np.ndarray:
    return META.records.encode(model.score(text, TOP_K, VOCAB).targets())


@contextmanager
def running(*servers: StandIn, timeout_s: float = 5.0) -> Iterator[ScoringPool]:
    models = [model_at(one, timeout_s) for one in servers]
    text = tuple(TEXT[:6])
    known = KnownText(text, models[0].score(text, TOP_K, VOCAB))
    pool = ScoringPool(models, known, compute, top_k=TOP_K, vocab=VOCAB)
    try:
        yield pool
    finally:
        pool.close()


def wait(pool: ScoringPool, answers: list[Future[np.ndarray]], limit_s: float = 10.0) -> list[np.ndarray]:
    began = time.monotonic()
    while not all(answer.done() for answer in answers):
        pool.check_silence(began, limit_s)
        time.sleep(0.005)
    return [answer.result() for answer in answers]


def expected(ids: list[int]) -> np.ndarray:
    """[n, V] log-probabilities at each token but the last."""
    return MODEL(ids)[:-1]


def test_answers_are_the_models_log_probabilities(server: StandIn) -> None:
    probe_of().run([model_at(server)])
    with running(server) as pool:
        (records,) = wait(pool, [pool.submit(TEXT)])
    found, truth = META.records.decode(records), expected(TEXT)
    top = np.sort(np.argsort(-truth, axis=1)[:, :TOP_K], axis=1)
    assert np.array_equal(found.ids, top)
    assert np.abs(found.logits - np.take_along_axis(truth, top, 1)).max() < 0.05  # of log12, far below the largest
    assert np.abs(found.label_log_prob - truth[np.arange(len(truth)), TEXT[1:]]).max() < 1e-5
    tail = np.log1p(-np.exp(np.take_along_axis(truth, top, 1)).sum(axis=1))
    assert np.abs(found.tail_lse[:, 0] - tail).max() < 1e-4


TEXT_OF_ANSWER = [504, 3575, 282, 4649]
VLLM_ANSWER = {
    "id": "cmpl-9968195df84bc8d8",
    "object": "text_completion",
    "model": "smol",
    "choices": [
        {
            "index": 0,
            "text": " is",
            "logprobs": None,
            "finish_reason": "length",
            "token_ids": [314],
            "prompt_logprobs": [
                None,
                {
                    "3575": {"logprob": -11.70806884765625, "rank": 3121, "decoded_token": " capital"},
                    "29": {"logprob": -0.8330687284469604, "rank": 1, "decoded_token": "-"},
                    "28": {"logprob": -2.58306884765625, "rank": 2, "decoded_token": ","},
                },
                {
                    "282": {"logprob": -0.33559009432792664, "rank": 1, "decoded_token": " of"},
                    "2240": {"logprob": -2.335590124130249, "rank": 2, "decoded_token": " city"},
                },
                {
                    "4649": {"logprob": -2.415597915649414, "rank": 2, "decoded_token": " France"},
                    "260": {"logprob": -2.165597915649414, "rank": 1, "decoded_token": " the"},
                },
            ],
            "prompt_token_ids": [504, 3575, 282, 4649],
            "routed_experts": None,
        }
    ],
    "system_fingerprint": "vllm-0.32.0-31882b8f",
    "usage": {"prompt_tokens": 4, "total_tokens": 5, "completion_tokens": 1},
}
"""Recorded from vLLM 0.32 with SmolLM2-135M-Instruct, shortened."""
SGLANG_ANSWER = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "id": "1",
        "prompt_tokens": 4,
        "completion_tokens": 0,
        "input_token_logprobs": [
            [None, 504, None],
            [-11.70806884765625, 3575, None],
            [-0.33559009432792664, 282, None],
            [-2.415597915649414, 4649, None],
        ],
        "input_top_logprobs": [
            None,
            [[-0.8330687284469604, 29, None], [-2.58306884765625, 28, None]],
            [[-0.33559009432792664, 282, None], [-2.335590124130249, 2240, None]],
            [[-2.165597915649414, 260, None], [-2.415597915649414, 4649, None]],
        ],
    },
}
"""The same in SGLang's documented form."""


@pytest.mark.parametrize(("api", "answer"), [("vllm", VLLM_ANSWER), ("sglang", SGLANG_ANSWER)])
def test_recorded_answers(api: str, answer: dict[str, Any]) -> None:
    """vLLM lists the text's own token first, which may be the K + 1st entry."""
    scores = APIS[api]().read(answer, TEXT_OF_ANSWER, 2)
    scores.check(np.array(TEXT_OF_ANSWER), 49152, "here")
    assert scores.top_ids.tolist() == [[29, 28], [282, 2240], [260, 4649]]
    assert np.abs(scores.own_log_probs - [-11.708069, -0.335590, -2.415598]).max() < 1e-6
    targets = scores.targets()
    assert targets.label_log_prob.dtype == np.float32 and np.exp(targets.logits).sum(axis=1).max() < 1


FAULTS = {
    "cut": (MkdTeacherError, "a text of 5 tokens; 10 other ones were sent: it must neither cut texts"),
    "special token": (MkdTeacherError, "a text of 11 tokens; 10 other ones were sent"),
    "other tokens": (MkdTeacherError, "for other tokens than those sent|contradicts"),
    "shifted": (MkdTeacherError, "for other tokens than those sent|contradicts"),
    "fewer": (MkdTeacherError, "with 4 of the most probable tokens at position 9; --kd-top-k 5 were requested"),
    "more": (MkdTeacherError, "of the most probable tokens at position 9; --kd-top-k 5 were requested"),
    "NaN": (MkdNumericError, "log-probabilities that are not finite"),
    "null": (MkdTeacherError, "in another form than vllm does"),
    "none": (MkdTeacherError, "another form|for 0 tokens, 10 were sent"),
    "beyond": (MkdTeacherError, "token 100000, but the vocabulary of this job has 50 tokens"),
    "probabilities": (MkdTeacherError, "not log-probabilities in descending order"),
    "contradiction": (MkdTeacherError, "contradicts the most probable ones|not log-probabilities"),
    "redirect": (MkdTeacherError, "redirects to .*127.0.0.2.*not followed"),
    "page": (MkdTeacherError, "something else than JSON"),
    "deep": (MkdTeacherError, "something else than JSON .*nested deeper"),
    "endless": (MkdTeacherError, "more than [0-9,]+ bytes"),
    "key": (MkdTeacherError, "status 401: .*Unauthorized.*; set MKD_TEACHER_API_KEY to the key of the server"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_answers(vllm: StandIn, fault: str) -> None:
    kind, words = FAULTS[fault]
    vllm.fault = fault
    with pytest.raises(kind, match=words) as error:
        model_at(vllm).score(TEXT, TOP_K, VOCAB)
    assert f"http://127.0.0.1:{vllm.port}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("level", [-12.0, -9999.0])
def test_logits_below_zero(server: StandIn, level: float) -> None:
    """Their exponentials do not add up to more than 1, as those of larger logits do."""
    server.model = lambda ids: MODEL(ids) + level
    with pytest.raises(MkdTeacherError, match="not log-probabilities: the other ones of 50 tokens are too few"):
        model_at(server).score(TEXT, TOP_K, VOCAB)


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 3.0, 30.0])
def test_distributions_from_uniform_to_certain(server: StandIn, sharpness: float) -> None:
    def model(ids: list[int]) -> np.ndarray:
        logits = np.random.default_rng(0).permuted(np.tile(np.linspace(-1, 1, VOCAB), (len(ids), 1)), axis=1)
        logits = logits * sharpness
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    server.model = model
    for top_k in (1, TOP_K, 20):
        model_at(server).score(TEXT, top_k, VOCAB)


@pytest.mark.parametrize("fault", ["cut", "special token", "fewer", "NaN"])
def test_wrong_answers_of_sglang(servers: dict[str, StandIn], fault: str) -> None:
    server = servers["sglang"]
    server.fault = fault
    try:
        with pytest.raises((MkdTeacherError, MkdNumericError)):
            model_at(server).score(TEXT, TOP_K, VOCAB)
    finally:
        server.fault = ""


@pytest.mark.parametrize("fault", ["busy", "half", "drip", "dead"])
def test_failures_that_pass(vllm: StandIn, fault: str) -> None:
    """A server that is overloaded, exits during an answer, or sends a byte at a time: the request is sent again."""
    vllm.fault = fault
    with pytest.raises(ServerLost):
        model_at(vllm, timeout_s=0.3).score(TEXT, TOP_K, VOCAB)


def test_an_answer_without_echo(vllm: StandIn) -> None:
    """Servers that do not know `return_token_ids`."""
    vllm.fault = "no echo"
    assert model_at(vllm).score(TEXT, TOP_K, VOCAB).top_ids.shape == (9, TOP_K)


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"top_k": 30}, {}, ["greater than max allowed: 20", "--kd-top-k", "--max-logprobs 30"]),
        ({"longest": 64}, {}, ["maximum context length", "--max-model-len 65", "--seq-length"]),
        ({"vocab": 60}, {}, ["vocabulary has 60 tokens", "another vocabulary"]),
        ({}, {"fault": "unsteady"}, ["the same text with log-probabilities that differ"]),
        ({"sentence": "text"}, {"tokens": [1, 2, 3]}, ["another tokenizer than the student", "[1, 2, 3]"]),
        ({}, {"fault": "cut"}, ["it must neither cut texts"]),
        ({}, {"fault": "busy"}, ["no inference server answers there within 0 s", "503"]),
        ({}, {"model": lambda ids: MODEL([len(ids), *ids])[1:]}, ["beginning of a text", "causal"]),
    ],
)
def test_probe(vllm: StandIn, changes: dict[str, Any], state: dict[str, Any], words: list[str]) -> None:
    for name, value in state.items():
        setattr(vllm, name, value)
    with pytest.raises(MkdTeacherError) as error:
        probe_of(**changes).run([model_at(vllm)])
    assert [word for word in words if word not in str(error.value)] == []


def test_probe_compares_addresses(servers: dict[str, StandIn], vllm: StandIn) -> None:
    vllm.model = table_model(VOCAB, seed=1)
    with pytest.raises(MkdTeacherError, match="is another teacher than http"):
        probe_of().run([model_at(servers["sglang"]), model_at(vllm)])


@pytest.mark.parametrize(
    ("fault", "api", "url", "words"),
    [
        ("", "auto", "", "vllm"),
        ("", "sglang", "", "sglang"),
        ("no owner", "vllm", "", "vllm"),
        ("strange owner", "auto", "", "does not report whether it is vLLM or SGLang .*--kd-teacher-api"),
        ("no owner", "auto", "", "does not report whether it is vLLM or SGLang .*--kd-teacher-api"),
        ("two models", "auto", "", r"serves the models t, adapter: give one as \?model=NAME"),
        ("two models", "auto", "/?model=t", "vllm"),
        ("", "auto", "?model=other", "serves the models t: give one"),
    ],
)
def test_finding_the_model(vllm: StandIn, fault: str, api: str, url: str, words: str) -> None:
    vllm.fault = fault
    address = ServerAddress.parse(FLAG, vllm.url + url)
    server = HttpServer(address, 5.0)
    if words in APIS:
        card = find_model(server, address, api, FLAG)
        assert (card.name, card.api, card.positions) == ("t", words, 64)
        return
    with pytest.raises(MkdTeacherError, match=words):
        find_model(server, address, api, FLAG)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_of_another_kind(status: int) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request).start()
        address = ServerAddress.parse(FLAG, f"http://127.0.0.1:{other.server_port}")
        words = rf"{FLAG} {address} has no /v1/models \(status {status}\): this is neither vLLM nor SGLang"
        with pytest.raises(MkdTeacherError, match=words):
            find_model(HttpServer(address, 5.0), address, "auto", FLAG)


def test_no_server_in_words_of_the_system() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = ServerAddress.parse(FLAG, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ServerLost) as error:
            HttpServer(address, 5.0).get("/v1/models", 100)
    refused = "Failed to establish a new connection: [Errno 111] Connection refused"
    assert str(error.value) == f"{address} does not answer: {refused}"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000"),
        ("https://host/teacher/v1/completions", "https://host:443/teacher"),
        ("http://host:30000/generate?model=a/b", "http://host:30000"),
        ("http://user:secret@host", None),
        ("ftp://host", None),
        ("http://host:99999", None),
        ("http://host:0", None),
        ("http://[fe80::1%eth0]:8000", None),
        ("http://a..b", None),
        ("http:///v1", None),
        ("http://host/?key=1", None),
        ("http://ho st", None),
    ],
)
def test_addresses(text: str, form: str | None) -> None:
    if form is not None:
        assert str(ServerAddress.parse(FLAG, text)) == form
        return
    with pytest.raises(MkdConfigError, match=FLAG):
        ServerAddress.parse(FLAG, text)


def test_environment(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment are not used; a key is."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(http.TEACHER.key, "abc")
    model_at(vllm).score(TEXT, TOP_K, VOCAB)
    assert vllm.seen_headers["Authorization"] == "Bearer abc"


def texts_of(count: int) -> list[list[int]]:
    return [[(7 * n + 3 * i) % VOCAB for i in range(8)] for n in range(count)]


def test_one_address_in_two_forms() -> None:
    """Weights would be loaded twice, the second time while texts are written."""
    with pytest.raises(MkdConfigError, match=r"--url http://a:80 http://a/v1\?model=t has an address twice"):
        parse_addresses("--url", ["http://a:80", "http://a/v1?model=t"])
    assert list(map(str, parse_addresses("--url", ["http://a", "https://a"]))) == ["http://a:80", "https://a:443"]


@pytest.mark.parametrize("key", ["abc\n", "a\rb", "k\u00e9y"])
def test_keys_that_are_none(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """They are not in the message, which is logged."""
    monkeypatch.setenv("MKD_TEACHER_API_KEY", key)
    with pytest.raises(MkdConfigError, match=r"^MKD_TEACHER_API_KEY has characters that no key has") as error:
        model_at(vllm)
    assert key.strip() not in str(error.value)


def test_a_route_that_is_not_implemented(vllm: StandIn) -> None:
    """It never will be, so the request is not sent again."""
    vllm.fault = "not implemented"
    with pytest.raises(ServerRefusal, match="status 501"):
        model_at(vllm).score(TEXT, TOP_K, VOCAB)


def test_a_killed_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that it has not answered, or not verified, go to another address, or to itself when it is back."""
    monkeypatch.setattr(pool_module, "_FIRST_PAUSE_S", 0.005)
    first, second = (StandIn(MODEL, vocab=VOCAB) for _ in range(2))
    first.delay_s = second.delay_s = 0.01
    with running(first, second) as pool:
        answers = [pool.submit(text) for text in texts_of(40)]
        while len(second.texts) < 4:
            time.sleep(0.001)
        second.stop()
        while len(first.texts) < 12:
            time.sleep(0.001)
        first.stop()
        time.sleep(0.05)
        again = StandIn(MODEL, vocab=VOCAB, port=first.port)
        found = wait(pool, answers)
        again.stop()
    with StandIn(MODEL, vocab=VOCAB) as alone, running(alone) as pool:
        truth = wait(pool, [pool.submit(text) for text in texts_of(40)])
    assert all(np.array_equal(one, other) for one, other in zip(found, truth, strict=True))


def test_a_server_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted between two texts, which no connection shows."""
    with StandIn(MODEL, vocab=VOCAB) as server, running(server) as pool:
        wait(pool, [pool.submit(TEXT)])
        server.model = table_model(VOCAB, seed=1)
        with pytest.raises(MkdTeacherError, match=r"is another teacher than at the start of this run: .* differ by"):
            wait(pool, [pool.submit(TEXT)])


def test_a_server_that_always_fails_before_its_answers_are_verified(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers the same texts again and again, of which none is used."""
    monkeypatch.setattr(pool_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(pool_module, "_LONGEST_PAUSE_S", 0.01)
    with running(vllm) as pool:
        true_score, known = ServedModel.score, pool._known.text

        def score(model: ServedModel, text: Any, *options: int) -> TokenScores:
            if tuple(text) == known:
                raise ServerLost("out of memory")
            return true_score(model, text, *options)

        monkeypatch.setattr(ServedModel, "score", score)
        answers, began, sent = [pool.submit(TEXT[:n]) for n in (7, 8, 9)], time.monotonic(), len(vllm.texts)
        with pytest.raises(MkdTeacherTimeout, match=r"has not answered for .*out of memory"):
            while time.monotonic() < began + 20.0:
                pool.check_silence(began, 1.0)
                time.sleep(0.01)
        assert len(vllm.texts) > sent + 2 * len(answers) and not any(answer.done() for answer in answers)


def test_a_silent_server(vllm: StandIn) -> None:
    with running(vllm) as pool:
        vllm.fault = "busy"
        with pytest.raises(MkdTeacherTimeout, match=r"--kd-teacher-timeout 0.2; .*503.*start it again"):
            wait(pool, [pool.submit(TEXT)], limit_s=0.2)


HEADS = {
    "byte for byte": itertools.chain(b"HTTP/1.1 200 OK\r\nX: ", itertools.repeat(ord("a"))),
    "other heads first": itertools.cycle([b"HTTP/1.1 100 Continue\r\n\r\n"]),
}


@pytest.mark.parametrize("form", HEADS)
def test_an_answer_that_never_begins(form: str) -> None:
    """Each piece arrives in time, and the answer never does."""

    def serve(listener: socket.socket) -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            for piece in HEADS[form]:
                connection.sendall(piece if isinstance(piece, bytes) else bytes([piece]))
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        server = HttpServer(ServerAddress("http", "127.0.0.1", listener.getsockname()[1]), 0.3)
        began = time.monotonic()
        with pytest.raises(ServerLost, match="timed out"):
            server.get("/v1/models", 100)
        assert time.monotonic() - began < 5.0
        server.close()
        thread.join(10.0)


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "a\nb", 3])
def test_names_of_models_that_are_no_text(name: Any) -> None:
    card = {"owned_by": "vllm", "max_model_len": -3}
    server = SimpleNamespace(get=lambda path, most: {"data": [{"id": name, **card}, {"id": "t", **card}]})
    found = find_model(server, ServerAddress("http", "a", 80), "auto", FLAG)
    assert (found.name, found.positions) == ("t", None)


def test_a_model_that_is_gone(vllm: StandIn) -> None:
    with running(vllm) as pool:
        vllm.name = "other"
        try:
            with pytest.raises(MkdTeacherError, match=r"404.*`t` does not exist"):
                wait(pool, [pool.submit(TEXT)])
        finally:
            vllm.name = "t"


def some_texts() -> list[Text]:
    return [Text(bytes([n]) * 16, slice(0, 7), tuple(ids)) for n, ids in enumerate(texts_of(3))]


def records_of(ids: tuple[int, ...]) -> np.ndarray:
    top = np.tile(np.arange(TOP_K), (len(ids) - 1, 1))
    values = np.tile(np.log(np.full(TOP_K, 0.15)), (len(ids) - 1, 1))
    return META.records.encode(TokenScores(top, values, values[:, 0] - ids[0]).targets())


def test_texts_are_kept(tmp_path: Path) -> None:
    folder, every = tmp_path / "cache", some_texts()
    store = TextStore(folder, META, "--kd-teacher-cache")
    assert store.find(every) == {}
    for text in every[:2]:
        store.add(text.key, records_of(text.ids))
    assert sorted(store.find(every)) == [text.key for text in every[:2]]
    store.flush()  # too early
    assert not list(folder.glob("shard-*"))
    store.flush(now=True)
    found = store.find(every[:2])
    assert all(np.array_equal(found[text.key], records_of(text.ids)) is False for text in every[:2])  # sealed
    again = TextStore(folder, META, "--kd-teacher-cache").find(every)
    assert {key: part.tobytes() for key, part in again.items()} == {key: part.tobytes() for key, part in found.items()}
    opened = TeacherStore(folder, "--kd-teacher-cache")
    assert len(opened) == 2 and opened.tokens == 14
    with pytest.raises(MkdCacheError, match=r"other properties .*top_k"):
        TextStore(folder, meta_of(true_vocab=VOCAB, top_k=4, values="log12"), "--kd-teacher-cache")
    short = Text(every[0].key, slice(0, 3), every[0].ids[:4])
    with pytest.raises(MkdCacheError, match="3 tokens in the data and 7 in the cache"):
        store.find([short])


def test_shards_of_other_ranks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_LOOK_S", 0.0)
    one, other = (TextStore(tmp_path, META, "--kd-teacher-cache") for _ in range(2))
    (text, *_) = some_texts()
    one.add(text.key, records_of(text.ids))
    assert other.find([text]) == {}
    one.flush(now=True)
    assert list(other.find([text])) == [text.key]


def test_a_full_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TextStore(tmp_path / "cache", META, "--kd-teacher-cache")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_writer, "_write", fail)
    store.add(b"a" * 16, records_of(tuple(TEXT)))
    with pytest.raises(MkdCacheError, match=r"--kd-teacher-cache .* cannot be written \(No space left on device\)"):
        store.flush(now=True)


def test_the_known_text_is_kept(tmp_path: Path, vllm: StandIn) -> None:
    file = KnownTextFile("--kd-teacher-cache", tmp_path / "new")
    known = KnownText(tuple(TEXT), model_at(vllm).score(TEXT, TOP_K, VOCAB))
    assert file.read() is None
    file.write(known)
    again = file.read()
    again.check(known.scores, "now", "before")
    with pytest.raises(MkdTeacherError, match="now is another teacher than before"):
        vllm.model = table_model(VOCAB, seed=1)
        again.check(model_at(vllm).score(TEXT, TOP_K, VOCAB), "now", "before")
    for damage in ("{", '{"text": [1, 2], "log_probs": [1, 2, 3]}', '{"text": ["a", "b"], "log_probs": [1]}', "[]"):
        (file.folder / NAME).write_text(damage)
        with pytest.raises(MkdCacheError, match=r"--kd-teacher-cache .*new: .known_text.json is damaged"):
            file.read()


def kept_by(folder: Path, seed: int, text: list[int] = TEXT) -> Path:
    """A cache with the answers of a server whose name does not depend on its weights."""
    store = TextStore(folder, META, "--kd-teacher-cache")
    records = table_model(VOCAB, seed)(TEXT)[:-1]
    ids = np.argsort(-records, axis=1)[:, :TOP_K]
    own = records[np.arange(len(records)), TEXT[1:]]
    scores = TokenScores(ids, np.take_along_axis(records, ids, axis=1), own)
    store.add(bytes([seed + 1]) * 16, META.records.encode(scores.targets()))
    store.flush(now=True)
    KnownTextFile("--kd-teacher-cache", folder).write(KnownText(tuple(text), scores))
    return folder


def test_merged_caches_are_of_one_server(tmp_path: Path) -> None:
    caches = [kept_by(tmp_path / str(seed), seed) for seed in (0, 1)]
    with pytest.raises(MkdTeacherError, match=r"that of merge .*1 is another teacher than that of merge .*0"):
        merge(tmp_path / "both", caches, "merge")
    assert not (tmp_path / "both").exists()
    merge(tmp_path / "one", caches[:1], "merge")
    before, after = (KnownTextFile("--cache", folder).read() for folder in (caches[0], tmp_path / "one"))
    assert after.text == before.text and after.scores.distance(before.scores) == 0.0
    kept_by(tmp_path / "2", 0, text=[*TEXT[:-1], 8])
    with pytest.raises(MkdCacheError, match=r"have other texts in \.known_text\.json"):
        merge(tmp_path / "both", [caches[0], tmp_path / "2"], "merge")


def test_a_run_that_continues_from_the_cache_of_another_server(tmp_path: Path) -> None:
    store = TeacherStore(kept_by(tmp_path / "cache", 0), "--kd-teacher-cache")
    kd = KDConfig(teacher_cache=str(store.folder), ratio=0.5)
    args = SimpleNamespace(
        load=str(tmp_path / "run"), save=str(tmp_path / "run"), finetune=False, reset_position_ids=False, seq_length=64
    )
    known = KnownTextFile("--cache", store.folder).read()
    spec = CachedTeacherSpec.of(store, args, kd, VOCAB)
    assert spec.known.scores.distance(known.scores) == 0.0 and spec.save == tmp_path / "run"
    kept_by(tmp_path / "run", 1)
    CachedTeacherSpec.of(store, args, kd, VOCAB)  # a new run
    (tmp_path / "run" / TRACKER).write_text("4")
    with pytest.raises(MkdTeacherError, match=r"that of --load .* is another teacher than that of --kd-teacher-cache"):
        CachedTeacherSpec.of(store, args, kd, VOCAB)
