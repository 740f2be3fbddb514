"""Joined requests, and health and metrics over HTTP, of a service whose model needs no ranks."""

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
import zmq

from mkd.errors import MkdConfigError
from mkd.job.teacher_service import ServiceOptions
from mkd.teacher.service import monitoring
from mkd.teacher.service.addresses import ServiceAddress
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.monitoring import Monitor, ServiceStatus
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.server import TeacherServer
from tests.unit.teacher.test_service import FACTS, HEAD, LIMIT_S, Ranks, request_of

STATUS = ServiceStatus(
    "serving", "f" * 32, dict(received=5, requests=4, passes=2, tokens=2_000_000, busy_s=1.5, refused=0, queue=1), 60.0
)


@pytest.fixture
def states() -> list[ServiceStatus]:
    return [STATUS]


@pytest.fixture
def url(states: list[ServiceStatus]) -> Iterator[str]:
    with closing(Monitor("127.0.0.1", 0, lambda: states[-1])) as monitor:
        yield monitor.url


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health(url: str, states: list[ServiceStatus]) -> None:
    code, text = fetch(f"{url}/health")
    assert code == 200 and json.loads(text) == {
        "status": "serving", "fingerprint": "f" * 32, "uptime_s": 60.0, **STATUS.counters
    }  # fmt: skip
    states.append(ServiceStatus("loading", "f" * 32, {}, 1.0))
    code, text = fetch(f"{url}/health")
    assert code == 503 and json.loads(text)["status"] == "loading"
    assert fetch(f"{url}/etc/passwd")[0] == 404


def test_metrics(url: str) -> None:
    code, text = fetch(f"{url}/metrics")
    assert code == 200
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["mkd_teacher_requests_total"] == "4" and values["mkd_teacher_tokens_total"] == "2000000"
    assert values["mkd_teacher_busy_seconds_total"] == "1.5" and values["mkd_teacher_serving"] == "1"
    for name in values:
        plain = name.partition("{")[0]
        assert re.search(rf"^# TYPE {plain} (counter|gauge)$", text, re.MULTILINE), name


def test_silent_and_random_clients_do_not_block_the_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring._Handler, "timeout", 0.1)
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        with socket.create_connection(("127.0.0.1", port)) as random:
            random.sendall(b"\x00\xff" * 50_000)
        assert fetch(f"{url}/health")[0] == 200
        silent.settimeout(LIMIT_S)
        assert silent.recv(1) == b""  # closed


def test_status_of_a_service() -> None:
    server = TeacherServer(FACTS, ServiceAddress("127.0.0.1", 0), None)
    assert server.status().state == "loading"
    server.serve(Ranks(), HEAD, lambda: True)
    assert server.status().state == "stopping" and server.status().metrics()
    server.close()


@pytest.mark.parametrize(
    ("most", "passes"),
    [(None, 4), (7, 4), (8, 3), (12, 2), (100, 2)],
)
def test_joined_requests(most: int | None, passes: int) -> None:
    """Three packed rows of 4 tokens, and one that is not packed."""
    server = TeacherServer(FACTS, ServiceAddress("127.0.0.1", 0), None, most)
    requests = [request_of([[i] * 4], bounds=(0, 2, 4)) for i in range(3)] + [request_of([[9] * 4])]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.address)
        for number, request in enumerate(requests):
            values = {"fingerprint": FACTS.fingerprint}
            dealer.send_multipart(Message(Kind.FORWARD, number, values, request.tensors).frames())
        while server.counters()["received"] < len(requests):
            server._read(100)
        server.serve(Ranks(), HEAD, lambda: True)
        answers = [Message.of(dealer.recv_multipart()) for _ in requests]
        assert [answer.number for answer in answers] == [0, 1, 2, 3]
        assert [answer.tensors[0].tolist() for answer in answers] == [
            [[i, 1.0, i, 1.0], [i, 2.0, i, 2.0]] for i in (0, 1, 2, 9)
        ]
        assert server.counters()["passes"] == passes
        server.close()


def test_rows_of_joined_requests() -> None:
    rows = [request_of([[1, 2, 3, 4], [5, 6, 7, 8]]), request_of([[9, 10, 11, 12]])]
    assert rows[0].can_join(rows[1]) and not rows[0].can_join(request_of([[1, 2]]))
    joined = ForwardRequest.joined(rows)
    assert joined.tokens.shape == (3, 4) and joined.wanted.tolist() == [1, 2, 9, 10] and len(joined.bounds) == 0
    packed = [request_of([[1, 2, 3, 4]], bounds=(0, 2, 4)), request_of([[5, 6]], bounds=(0, 2))]
    joined = ForwardRequest.joined([*packed, packed[0]])
    assert joined.bounds.tolist() == [0, 2, 4, 6, 8, 10] and joined.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4]]
    assert torch.equal(joined.wanted, torch.tensor([1, 2, 5, 6, 7, 8]).int())
    assert not packed[0].can_join(rows[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"metrics_port": 70_000}, "--metrics-port is 70000"),
        ({"metrics_port": -1}, "--metrics-port is -1"),
    ],
)
def test_invalid_options(options: dict[str, int], words: str) -> None:
    with pytest.raises(MkdConfigError, match=words):
        ServiceOptions("tcp://127.0.0.1:5757", **options).check()
