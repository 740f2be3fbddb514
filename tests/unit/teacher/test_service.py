"""The teacher service with a model that needs no ranks: messages, limits, secrets, lost connections."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.errors import MkdConfigError, MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.losses import LinearLogits, LogitMap, VocabLayout, teacher_top_k
from mkd.losses.measure.sampling import sample_teacher_tokens
from mkd.teacher.cache.sampling import count_ids, stratified_uniforms
from mkd.teacher.service.addresses import TOKEN, Secret, ServiceAddress, require_secret
from mkd.teacher.service.answers import HiddenAnswers, TargetAnswers, Uploads
from mkd.teacher.service.client import ServedTeacher
from mkd.teacher.service.connections import TeacherConnections, request_facts
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message, ProtocolError
from mkd.teacher.service.model import Order
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.server import TeacherServer, most_request_bytes
from mkd.teacher.service.targets import SampledTargets, TopKTargets, read_targets

FACTS = TeacherFacts(
    fingerprint="a" * 32,
    description="small",
    tokenizer=None,
    vocab=50,
    positions=16,
    width=4,
    logit_scale=1.0,
    dtype="float32",
    packed=True,
    most_tokens=64,
    row_multiple=2,
    segment_multiple=2,
)
HEAD = torch.arange(200.0).view(50, 4)
LIMIT_S = 120.0
"""Limit of every wait for something that happens on a busy machine too."""


class Ranks:
    """Hidden states are token ids and positions."""

    def __init__(self, may_compute: threading.Event | None = None) -> None:
        self._may_compute = may_compute

    def order(self, order: Order, request: ForwardRequest | None = None) -> Tensor | None:
        if request is None:
            return None
        if self._may_compute is not None:
            assert self._may_compute.wait(LIMIT_S)
        hidden = torch.stack([request.tokens.flatten(), request.positions.flatten()] * 2, dim=1).float()
        return hidden.index_select(0, request.wanted.long())


@contextmanager
def running(
    facts: TeacherFacts = FACTS, port: int = 0, secret: Secret | None = None, ranks: Any = None
) -> Iterator[ServiceAddress]:
    """A service in a thread; its address."""
    server, stop = TeacherServer(facts, ServiceAddress("127.0.0.1", port), secret), threading.Event()
    thread = threading.Thread(target=server.serve, args=(ranks or Ranks(), HEAD, stop.is_set))
    thread.start()
    try:
        yield ServiceAddress("127.0.0.1", int(server.address.rpartition(":")[2]))
    finally:
        stop.set()
        thread.join()
        server.close()


@contextmanager
def connected(*addresses: ServiceAddress, secret: Secret | None = None) -> Iterator[TeacherConnections]:
    connections = TeacherConnections(addresses, secret, FACTS, 1 << 20)
    try:
        yield connections
    finally:
        connections.close()


def request_of(tokens: list[list[int]], bounds: tuple[int, ...] = ()) -> ForwardRequest:
    ids = torch.tensor(tokens, dtype=torch.int32)
    positions = torch.arange(ids.shape[1], dtype=torch.int32).expand_as(ids).contiguous()
    return ForwardRequest(ids, positions, torch.tensor(bounds, dtype=torch.int32), torch.tensor([1, 2]).int())


def ask(connections: TeacherConnections, request: ForwardRequest, fingerprint: str = FACTS.fingerprint) -> Future:
    return connections.submit(Message(Kind.FORWARD, 0, {"fingerprint": fingerprint}, request.tensors))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_messages_keep_every_bit(dtype: torch.dtype) -> None:
    tensors = (torch.arange(6).view(2, 3).to(dtype), torch.empty(0, 4, dtype=dtype))
    sent = Message(Kind.HIDDEN, 2**63, {"fingerprint": "f"}, tensors)
    seen = Message.of([bytes(frame) for frame in sent.frames()])
    assert (seen.kind, seen.number, seen.values) == (sent.kind, sent.number, sent.values)
    for one, other in zip(seen.tensors, tensors, strict=True):
        assert one.dtype == dtype and torch.equal(one, other)


def _damaged() -> Iterator[list[bytes]]:
    frames = [bytes(one) for one in Message(Kind.FORWARD, 1, {}, (torch.zeros(2, 3),)).frames()]
    head, body = frames
    yield []
    yield [head]
    yield [head, body, body]
    yield [head, *[body] * 9]
    yield [head, body[:-1]]
    yield [b"", body]
    yield [b"GET / HTTP/1.1\r\n\r\n"]
    yield [head[:12], body]
    yield [head.replace(b"MKDT", b"MKDX"), body]
    yield [head[:4] + b"\xff\x00" + head[6:], body]
    yield [head[:6] + b"\x63" + head[7:], body]
    yield [head.replace(b"[2,3]", b"[2,-3]"), body]
    yield [head.replace(b"[2,3]", b"[2,1e9]"), body]
    yield [head.replace(b"[2,3]", b"[999999999,999999999]"), body]
    yield [head.replace(b"float32", b"object"), body]
    yield [head[:16] + b"[" * 5000, body]
    yield [head[:16] + b"[1]", body]
    yield [head[:16] + b'{"values":{"x":"' + b"x" * 20_000 + b'"},"tensors":[]}']


@pytest.mark.parametrize("frames", list(_damaged()))
def test_damaged_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Message.of(frames)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": torch.zeros(1, 66).int()}, "up to 64 tokens"),
        ({"tokens": torch.zeros(0, 4).int()}, "rows of shape"),
        ({"tokens": torch.full((1, 4), 50).int()}, "vocabulary of 50"),
        ({"tokens": torch.full((1, 4), -1).int()}, "vocabulary of 50"),
        ({"tokens": torch.zeros(1, 4)}, "int32"),
        ({"positions": torch.full((1, 4), 16).int()}, "16"),
        ({"positions": torch.zeros(1, 2).int()}, "fit the rows"),
        ({"wanted": torch.tensor([4]).int()}, "wanted"),
        ({"wanted": torch.tensor([2, 1]).int()}, "wanted"),
        ({"wanted": torch.tensor([-1]).int()}, "wanted"),
        ({"bounds": torch.tensor([0, 3, 4]).int()}, "multiples of 2"),
        ({"bounds": torch.tensor([0, 2]).int()}, "bounds"),
        ({"bounds": torch.tensor([0, 4, 2, 4]).int()}, "multiples of 2"),
        ({"tokens": torch.zeros(1, 3).int(), "positions": torch.zeros(1, 3).int()}, "not a multiple of 2"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        ForwardRequest.of_tensors(replace(request_of([[1, 2, 3, 4]]), **changes).tensors, FACTS)


@pytest.mark.parametrize(
    "values",
    [
        *(None, 4, {}, {"top_k": 2}, {"top_k": 2, "vocab": 50, "temperature": 1.0, "samples": 1}),
        *({"top_k": 0}, {"top_k": "2"}, {"top_k": 2.0}, {"vocab": 51}, {"vocab": 1}, {"top_k": 2**60}, {"top_k": 5}),
        *({"samples": 4, "vocab": 50, "temperature": 1.0, "more": 1}, {"samples": 0, "vocab": 50, "temperature": 1.0}),
        *({"samples": 14, "vocab": 50, "temperature": 1.0}, {"samples": True, "vocab": 50, "temperature": 1.0}),
        *({"temperature": value} for value in (0.0, -1.0, float("nan"), float("inf"), 1)),
    ],
)
def test_impossible_targets_are_refused(values: Any) -> None:
    facts, whole = replace(FACTS, width=16), {"top_k": 2, "vocab": 50, "temperature": 1.0}
    assert read_targets(whole, facts).values() == whole
    if isinstance(values, dict) and len(values) == 1:
        values = whole | values if values != {"top_k": 2} else values
    with pytest.raises(ProtocolError, match=r"targets|larger than hidden states"):
        read_targets(values, facts)


@pytest.mark.parametrize("labels", [None, torch.tensor([1]).int(), torch.tensor([1, 50]).int()])
def test_targets_need_labels(labels: Tensor | None) -> None:
    targets = TopKTargets(2, 50, 1.0)
    request = replace(request_of([[1, 2, 3, 4]]), labels=torch.tensor([1, 2]).int())
    assert ForwardRequest.of_tensors(request.tensors, FACTS, targets).targets == targets
    with pytest.raises(ProtocolError):
        ForwardRequest.of_tensors(request.tensors, FACTS)
    with pytest.raises(ProtocolError):
        ForwardRequest.of_tensors(replace(request, labels=labels).tensors, FACTS, targets)


def test_requests_with_other_targets_are_not_joined() -> None:
    one = replace(request_of([[1, 2, 3, 4]]), labels=torch.tensor([1, 2]).int(), targets=TopKTargets(2, 50, 1.0))
    assert one.can_join(one) and ForwardRequest.joined([one, one]).labels.tolist() == [1, 2, 1, 2]
    assert ForwardRequest.joined([one, one]).targets == one.targets
    for targets in (None, TopKTargets(3, 50, 1.0)):
        assert not one.can_join(replace(one, targets=targets))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 500.0])
def test_targets_keep_every_bit(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, 64, generator=generator) for rows in (6, 56))
    teacher, labels = LinearLogits(hidden, head), torch.arange(6)
    targets = TopKTargets(4, 50, temperature)
    (truth,) = teacher_top_k(teacher, 4, temperatures=(temperature,), vocab=VocabLayout(50))
    words = targets.compute(teacher, labels, None, None)
    assert targets.is_finite(words) and words.shape == (6, targets.columns)
    signal = targets.signal(words.view(2, 3, -1))
    for name in ("ids", "logits", "lse", "tail_lse"):
        seen, expected = getattr(signal.targets, name), getattr(truth, name)
        assert seen.dtype == expected.dtype and torch.equal(seen.flatten(0, 1), expected), name
    own = (hidden @ head[:50].t()).log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
    assert torch.allclose(signal.label_log_prob.flatten(), own, atol=1e-5)
    hidden[2, 3] = torch.nan
    assert not targets.is_finite(targets.compute(teacher, labels, None, None))
    assert targets.compute(replace(teacher, hidden=hidden[:0]), labels[:0], None, None).shape == (0, targets.columns)


def test_sampled_targets_are_those_of_a_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, 64, generator=generator) for rows in (6, 56))
    teacher, labels, keys = LinearLogits(hidden, head), torch.arange(6), (b"0123456789abcdef", b"fedcba9876543210")
    targets = SampledTargets(10, 50, 2.0)
    tokens = KDBatch.of_tokens(labels[None], labels[None], (0, 4, 6))
    batch = replace(tokens, segment_hashes=keys)
    request = ForwardRequest.of_batch(batch, torch.ones(1, 6, dtype=torch.bool), targets)
    assert ForwardRequest.of_tensors(request.tensors, FACTS, targets).keys.tolist() == request.keys.tolist()
    with pytest.raises(ProtocolError, match="keys of shape"):
        ForwardRequest.of_tensors(replace(request, keys=request.keys[:1]).tensors, FACTS, targets)
    uniforms = torch.cat([stratified_uniforms(keys[0], 4, 10), stratified_uniforms(keys[1], 2, 10)])
    assert torch.equal(request.uniforms(), uniforms)
    part = replace(request, wanted=torch.tensor([1, 5]).int())
    assert torch.equal(part.uniforms(), uniforms[[1, 5]])
    words = targets.compute(teacher, labels, uniforms, None)
    assert targets.is_finite(words) and words.shape == (6, targets.columns)
    signal = targets.signal(words.view(2, 3, -1))
    sparse = signal.targets.flatten_tokens()
    found = sample_teacher_tokens(teacher, uniforms, 2.0, temperatures=(1.0,), vocab=VocabLayout(50)).ids
    ids, counts = count_ids(found.numpy(), 10)
    order = [0, 3, 1, 4, 2, 5]  # [b, s] -> [s * b]
    for token, own, logits in zip(order, sparse.ids, sparse.logits, strict=True):
        known = {int(i): int(c) for i, c in zip(ids[token], counts[token], strict=True) if c}
        assert {int(i): int((own == i).sum()) for i in own} == known
        expected = torch.tensor([known[int(i)] / 10 for i in own]).log() * 2.0
        assert torch.allclose(logits, expected)
    truth = (hidden @ head[:50].t()).log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
    assert torch.allclose(signal.label_log_prob.flatten(), truth, atol=1e-5)
    assert targets.compute(replace(teacher, hidden=hidden[:0]), labels[:0], uniforms[:0], None).shape == (0, 12)


@pytest.mark.parametrize("kind", [TopKTargets, SampledTargets])
def test_targets_with_other_token_ids_are_refused(kind: type[TopKTargets | SampledTargets]) -> None:
    targets = kind(3, 50, 1.0)
    answers = TargetAnswers(FACTS, SimpleNamespace(leads_replica=False), targets)
    client = ServedTeacher.__new__(ServedTeacher)
    client._answers, client._facts, client._targets = answers, FACTS, targets
    words = torch.zeros(2, targets.columns, dtype=torch.int32)

    def read(*ids: int) -> Tensor:
        words[1, :3] = torch.tensor(ids)
        return client._read(2, Message(Kind.TARGETS, 0, {"fingerprint": FACTS.fingerprint}, (words,)))

    assert read(0, 48, 49) is words
    for ids in ((0, 48, 50), (-1, 48, 49), *[(0, 49, 48)][: kind is SampledTargets]):
        with pytest.raises(MkdTeacherError, match="token ids outside of the vocabulary of 50 tokens, or in another"):
            read(*ids)


def test_packed_rows_need_a_service_for_them() -> None:
    request = request_of([[1, 2, 3, 4]], bounds=(0, 2, 4))
    assert ForwardRequest.of_tensors(request.tensors, FACTS).batch().bounds == (0, 2, 4)
    with pytest.raises(ProtocolError, match="--kd-packing best_fit"):
        ForwardRequest.of_tensors(request.tensors, replace(FACTS, packed=False))


@pytest.mark.parametrize(
    "change",
    [
        *({"width": "4"}, {"vocab": 0}, {"dtype": "int8"}, {"packed": 1}, {"more": 1}, {"width": 2**20}),
        *({"logit_scale": float("nan")}, {"logit_scale": float("inf")}, {"logit_softcap": float("inf")}),
    ],
)
def test_impossible_facts_are_refused(change: dict[str, Any]) -> None:
    assert TeacherFacts.of(FACTS.values()) == FACTS
    with pytest.raises(ProtocolError):
        TeacherFacts.of(FACTS.values() | change)


def test_answers_have_the_wanted_tokens() -> None:
    with running() as address, connected(address) as connections:
        answer = ask(connections, request_of([[7, 8, 9, 10]])).result(LIMIT_S)
        assert answer.tensors[0].tolist() == [[8, 1, 8, 1], [9, 2, 9, 2]]
        rows = connections.submit(Message(Kind.HEAD, 0, {"fingerprint": FACTS.fingerprint, "start": 48, "count": 5}))
        assert torch.equal(rows.result(LIMIT_S).tensors[0], HEAD[48:])


def test_requests_that_were_read_are_answered_at_the_end() -> None:
    server = TeacherServer(FACTS, ServiceAddress("127.0.0.1", 0), None)
    thread = threading.Thread(target=server.serve, args=(Ranks(), HEAD, lambda: server.counters()["received"] == 3))
    thread.start()
    with connected(ServiceAddress.parse("--address", server.address)) as connections:
        answers = [ask(connections, request_of([[i] * 4])) for i in range(3)]
        assert [answer.result(LIMIT_S).tensors[0][0, 0] for answer in answers] == [0, 1, 2]
        thread.join()
        server.close()


def test_requests_that_have_arrived_are_answered_at_the_end() -> None:
    server = TeacherServer(FACTS, ServiceAddress("127.0.0.1", 0), None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.address)
        values = {"fingerprint": FACTS.fingerprint}
        dealer.send_multipart(Message(Kind.FORWARD, 7, values, request_of([[5] * 4]).tensors).frames())
        assert server._socket.poll(1000 * LIMIT_S)
        server.serve(Ranks(), HEAD, lambda: True)
        answer = Message.of(dealer.recv_multipart())
        assert (answer.kind, answer.number) == (Kind.HIDDEN, 7)
        server.close()


def test_the_device_computes_while_answers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where answers are complete some time after the launch: the next pass is launched before."""
    events: list[str] = []

    class LoggedRanks(Ranks):
        def order(self, order: Order, request: ForwardRequest | None = None) -> Tensor | None:
            if request is not None:
                events.append(f"launch {request.tokens[0, 0]}")
            return super().order(order, request)

    def to_host(server: TeacherServer, found: Tensor) -> tuple[Tensor, Any]:
        return found, SimpleNamespace(synchronize=lambda: events.append(f"answer {found[0, 0]:.0f}"))

    monkeypatch.setattr(TeacherServer, "_to_host", to_host)
    server = TeacherServer(FACTS, ServiceAddress("127.0.0.1", 0), None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.address)
        values = {"fingerprint": FACTS.fingerprint}
        for number in range(3):
            dealer.send_multipart(Message(Kind.FORWARD, number, values, request_of([[number] * 4]).tensors).frames())
        while len(server._queue) < 3:
            server._read(1000)
        server.serve(LoggedRanks(), HEAD, lambda: True)
        for number in range(3):
            answer = Message.of(dealer.recv_multipart())
            assert answer.number == number and answer.tensors[0][0, 0] == number
        server.close()
    assert events == ["launch 0", "launch 1", "answer 0", "launch 2", "answer 1", "answer 2"]
    counters = server.counters()
    assert (counters["requests"], counters["passes"], counters["queue"]) == (3, 3, 0) and counters["busy_s"] > 0


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 4000])
def test_random_bytes_disturb_nobody(words: bytes) -> None:
    with running() as address, socket.create_connection(("127.0.0.1", address.port)) as raw:
        with suppress(ConnectionError):  # the service may have closed the connection by then
            raw.sendall(words)
        with connected(address) as connections:
            assert ask(connections, request_of([[7, 8, 9, 10]])).result(LIMIT_S).tensors[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("frames", "is_refused"),
    [
        pytest.param([b"x" * 100] * 50, True, id="frames"),
        pytest.param([b"x" * (2 * most_request_bytes(FACTS))], False, id="a large frame"),
        pytest.param(Message(Kind.HEAD, 1, {"start": -1}).frames(), True, id="no rows"),
        pytest.param(Message(Kind.HIDDEN, 1).frames(), True, id="an answer"),
    ],
)
def test_random_clients_disturb_nobody(frames: list[bytes], is_refused: bool) -> None:
    with running() as address, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        lost = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(str(address))
        dealer.send_multipart(frames)
        seen = dealer if is_refused else lost  # a client that sends too much is disconnected
        assert seen.poll(1000 * LIMIT_S)
        if is_refused:
            assert Message.of(dealer.recv_multipart()).kind == Kind.REFUSED
        dealer.disable_monitor()
        lost.close(0)
        with connected(address) as connections:
            assert ask(connections, request_of([[7, 8, 9, 10]])).result(LIMIT_S).tensors[0].shape == (2, 4)


def test_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = Secret.of("a secret of the tests"), Secret.of("another one of the tests")
    with running(secret=ours) as address:
        assert request_facts([address], ours, LIMIT_S, "--url") == [FACTS]
        for wrong in (other, replace(ours, client=other.client), None):
            with pytest.raises(MkdTeacherError, match=f"--url {address}.*{TOKEN} must be the same"):
                request_facts([address], wrong, LIMIT_S, "--url")
    with running() as address, pytest.raises(MkdTeacherError, match=TOKEN):
        request_facts([address], ours, LIMIT_S, "--url")


def test_secret_of_the_environment() -> None:
    assert Secret.from_environment({}) is None
    assert Secret.from_environment({TOKEN: "x" * 16}) == Secret.of("x" * 16)
    with pytest.raises(MkdConfigError, match=f"{TOKEN} has 5 characters"):
        Secret.from_environment({TOKEN: "short"})


@pytest.mark.parametrize("text", ["tcp://0.0.0.0:1", "tcp://node7:5757", "tcp://10.0.0.1:5757", "tcp://[::]:5757"])
def test_other_machines_need_a_secret(text: str) -> None:
    address = ServiceAddress.parse("--address", text)
    with pytest.raises(MkdConfigError, match=f"--address {text}".replace("[", r"\[") + f".*{TOKEN}"):
        require_secret("--address", address, None)
    require_secret("--address", address, Secret("s", "c"))
    require_secret("--address", ServiceAddress.parse("--address", "tcp://localhost:5757"), None)


@pytest.mark.parametrize("text", ["127.0.0.1:5757", "tcp://x", "tcp://x:70000", "tcp://x:0", "ipc://x", "tcp://a b:1"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(MkdConfigError, match=r"tcp://HOST:PORT"):
        ServiceAddress.parse("--kd-teacher-url", text)


@pytest.mark.parametrize("host", ["-", "..", "_._"])
def test_hosts_that_are_no_names(host: str) -> None:
    with pytest.raises(MkdTeacherError, match=rf"tcp://{host}:5757 is no address to connect to \(Invalid argument\)"):
        request_facts([ServiceAddress.parse("--kd-teacher-url", f"tcp://{host}:5757")], None, 1.0, "--url")


def test_nobody_answers() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = ServiceAddress("127.0.0.1", bound.getsockname()[1])
        with pytest.raises(MkdTeacherTimeout, match=f"--url {address}: no teacher answers there within 1 s"):
            request_facts([address], None, 1.0, "--url")


def test_another_teacher_at_the_address() -> None:
    with running() as address:
        connections = TeacherConnections([address], None, FACTS, 1 << 20)
        ask(connections, request_of([[1, 2, 3, 4]])).result(LIMIT_S)
    with running(replace(FACTS, fingerprint="b" * 32), port=address.port):
        with pytest.raises(MkdTeacherError, match=f"is {'b' * 32} .* now, and was {'a' * 32}"):
            ask(connections, request_of([[1, 2, 3, 4]])).result(LIMIT_S)
        with pytest.raises(MkdTeacherError):  # and every later one, at once
            ask(connections, request_of([[1, 2, 3, 4]])).result(0)
        connections.close()


def test_requests_to_another_teacher_are_refused() -> None:
    with running() as address, connected(address) as connections:
        answer = ask(connections, request_of([[1, 2, 3, 4]]), "c")
        with pytest.raises(MkdTeacherError, match=r"refuses a request: the teacher here is a+, not c"):
            answer.result(LIMIT_S)


def test_answers_are_read_beside_the_work_of_the_thread_that_waits() -> None:
    """An error of the reader is that of its own request only."""
    reader: list[str] = []

    def read(answer: Message) -> Tensor:
        reader.append(threading.current_thread().name)
        if answer.tensors[0][0, 0] == 7.0:
            raise MkdNumericError("not finite")
        return answer.tensors[0]

    with running() as address, connected(address) as connections:
        values = {"fingerprint": FACTS.fingerprint}
        messages = [Message(Kind.FORWARD, 0, values, request_of([[i] * 4]).tensors) for i in (7, 8)]
        failed, read_one = [connections.submit(message, read) for message in messages]
        with pytest.raises(MkdNumericError, match="not finite"):
            failed.result(LIMIT_S)
        assert read_one.result(LIMIT_S)[0, 0] == 8.0 and set(reader) == {"teacher service"}


def test_pinned_answers_take_powers_of_two() -> None:
    for pins, sizes in (False, [0, 5, 64, 65]), (True, [1, 8, 64, 128]):
        connections = TeacherConnections([], None, FACTS, 1 << 20, pins=pins)
        assert [connections.host_bytes(size) for size in (0, 5, 64, 65)] == sizes
        connections.close()


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf, 3e38])
def test_numbers_that_are_not_finite(value: float) -> None:
    """The sum of large numbers overflows although each is finite."""
    answer = torch.ones(3, 4)
    answer[1, 2:] = value
    found = HiddenAnswers(4, torch.float32, LogitMap(1.0), None, None, sequence_parallel=False).is_finite(answer)
    assert found == math.isfinite(value) and (value != 3e38 or not answer.sum().isfinite())


def test_uploads_of_a_step() -> None:
    """Each microbatch is read once, one before it is needed, also when a step ends early or is computed again."""
    read: list[int] = []

    def received(number: int) -> tuple[Tensor, Tensor]:
        read.append(number)
        return torch.tensor([number]), torch.full((1, 2), float(number))

    uploads = Uploads()
    for numbers in ([0, 1, 2], [0], [0, 1, 2]):
        read.clear()
        uploads.begin(3, received)
        for number in numbers:
            wanted, states = uploads.take(number)
            assert wanted.item() == number and states.tolist() == [[number, number]]
            assert read == list(range(min(number + 2, 3)))


def test_a_lost_address_is_left_out() -> None:
    """The address that is lost has read requests and computes none of them."""
    may_compute = threading.Event()
    ranks = Ranks(may_compute)
    with running(ranks=ranks) as stays, zmq.Context() as context, context.socket(zmq.ROUTER) as dies:
        dies.bind("tcp://127.0.0.1:*")
        other = ServiceAddress.parse("--address", dies.last_endpoint.decode())
        with connected(stays, other) as connections:
            client, head = dies.recv_multipart()
            facts = Message(Kind.FACTS, Message.of([head]).number, FACTS.values())
            dies.send_multipart([client, *facts.frames()])
            answers = [ask(connections, request_of([[i, i, i, i]])) for i in range(50)]
            while Message.of(dies.recv_multipart()[1:]).kind != Kind.FORWARD:
                pass
            dies.close(0)
            may_compute.set()
            for number, answer in enumerate(answers):
                assert answer.result(LIMIT_S).tensors[0][0, 0] == number


def test_a_service_that_starts_again_gets_the_requests(capsys: pytest.CaptureFixture) -> None:
    with running() as address:
        connections = TeacherConnections([address], None, FACTS, 1 << 20)
        ask(connections, request_of([[1, 2, 3, 4]])).result(LIMIT_S)
    answer = ask(connections, request_of([[3, 4, 5, 6]]))
    with pytest.raises(TimeoutError):
        answer.result(0.1)
    with running(port=address.port):
        assert answer.result(LIMIT_S).tensors[0].shape == (2, 4)
        connections.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if str(address.port) in line]
    assert lines == [
        f"mkd: lost the teacher at {address}: further requests are sent to the next service that answers",
        f"mkd: the teacher at {address} answers again",
    ]


def test_a_fault_after_a_lost_connection_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the requests that the lost service had."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as dies:
        dies.bind("tcp://127.0.0.1:*")
        with connected(ServiceAddress.parse("--address", dies.last_endpoint.decode())) as connections:
            client, _ = dies.recv_multipart()
            dies.send_multipart([client, *Message(Kind.FACTS, 0, FACTS.values()).frames()])
            answers = [ask(connections, request_of([[i] * 4])) for i in range(3)]
            for _ in answers:
                dies.recv_multipart()

            def fail(*_: Any) -> None:
                raise OSError("too many open files")

            monkeypatch.setattr(connections, "_connect", fail)
            dies.close(0)
            for answer in answers:
                with pytest.raises(OSError, match="too many open files"):
                    answer.result(LIMIT_S)


def test_a_client_that_sends_without_end_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkd.teacher.service.server._MOST_QUEUED", 2)
    server = TeacherServer(FACTS, ServiceAddress("127.0.0.1", 0), None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.address)
        for _ in range(3):
            dealer.send_multipart(Message(Kind.HELLO).frames())
        server._read(1000 * LIMIT_S)
        for _ in range(2):
            assert Message.of(dealer.recv_multipart()).kind == Kind.FACTS
        assert not dealer.poll(20)
        server._read(1000 * LIMIT_S)
        assert Message.of(dealer.recv_multipart()).kind == Kind.FACTS
        server.close()


def test_a_service_that_sends_without_end_does_not_stop_the_work() -> None:
    """Its messages are read some at a time, between which the client sends requests and may end."""
    frames, read = [zmq.Frame(one) for one in Message(Kind.STATUS, 7).frames()], []

    def receive(copy: bool) -> list[zmq.Frame]:
        read.append(frames)
        assert len(read) < 10_000
        return frames

    endless = SimpleNamespace(poll=lambda _: 1, recv_multipart=receive)
    nothing = SimpleNamespace(poll=lambda _: 0)
    link = SimpleNamespace(socket=endless, monitor=nothing, requests={}, greet=lambda: None)
    connections = TeacherConnections([ServiceAddress("127.0.0.1", 1)], None, FACTS, 1 << 20)
    assert connections._serve(link)
    connections.close()


def test_a_peer_that_closes_each_connection_is_not_called_without_pause() -> None:
    """A forwarded port is one, while nothing listens behind it; the service that begins to listen there is found."""
    calls, limit = 0, time.monotonic() + 1.0
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        peer.bind(("127.0.0.1", 0))
        peer.listen()
        peer.settimeout(0.1)
        port = peer.getsockname()[1]
        connections = TeacherConnections([ServiceAddress("127.0.0.1", port)], None, FACTS, 1 << 20)
        answer = ask(connections, request_of([[1, 2, 3, 4]]))
        while time.monotonic() < limit:
            with suppress(TimeoutError):
                peer.accept()[0].close()
                calls += 1
    assert 0 < calls < 50
    with running(port=port):
        answer.result(LIMIT_S)
    connections.close()


def test_a_fault_at_the_start_of_the_thread_is_raised() -> None:
    connections = TeacherConnections([ServiceAddress("127.0.0.1", 1)], None, FACTS, 2**80)
    with pytest.raises(Exception, match="int"):
        ask(connections, request_of([[1] * 4])).result(10)
    connections.close()
