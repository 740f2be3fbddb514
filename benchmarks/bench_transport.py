"""Bytes per second of a teacher service's answers, between two processes of one machine.

    python benchmarks/bench_transport.py [--tokens 8192] [--width 4096] [--top-k 64] [--answers 40]

The service has a model that costs nothing: each answer is the same tensor. The client receives answers as a student's
rank does, several under way at a time: at a socket file (ipc), over TCP at 127.0.0.1, and there with a secret, with
which everything is encrypted. CPU seconds per GB, of all threads of each side, are less sensitive to other work on the
machine.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections import deque
from multiprocessing.synchronize import Event

import torch
from torch import Tensor

from mkd.teacher.service.addresses import Address, Secret, ServiceAddress, parse_address
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.model import Order
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.server import TeacherServer
from mkd.teacher.service.targets import TopKTargets

UNDER_WAY = 8
"""Requests at a time."""
VOCAB = 128_256


class _Ranks:
    """A model that costs nothing."""

    def __init__(self, answer: Tensor) -> None:
        self._answer = answer

    def order(self, order: Order, request: ForwardRequest | None = None) -> Tensor | None:
        return None if request is None else self._answer


def facts_of(args: argparse.Namespace) -> TeacherFacts:
    """A teacher of this width."""
    return TeacherFacts(
        fingerprint="t" * 32,
        description="none",
        tokenizer=None,
        vocab=VOCAB,
        positions=None,
        width=args.width,
        logit_scale=1.0,
        dtype="bfloat16",
        packed=True,
        most_tokens=args.tokens,
        row_multiple=1,
        segment_multiple=1,
    )


def targets_of(args: argparse.Namespace) -> TopKTargets | None:
    """The targets of --top-k; None for hidden states."""
    return None if args.top_k is None else TopKTargets(args.top_k, VOCAB, 1.0)


def serve(
    args: argparse.Namespace,
    address: Address,
    secret: Secret | None,
    found: "multiprocessing.Queue[str | float]",
    stop: Event,
) -> None:
    """Serve until `stop`; the address, and at the end the CPU seconds, are put into a queue."""
    targets = targets_of(args)
    answer = torch.randn(args.tokens, args.width).bfloat16()
    if targets is not None:
        answer = torch.zeros(args.tokens, targets.columns, dtype=torch.int32)
    server = TeacherServer(facts_of(args), address, secret)
    found.put(server.address)
    began = time.process_time()
    server.serve(_Ranks(answer), torch.empty(0), stop.is_set)
    server.close()
    found.put(time.process_time() - began)


def measure(args: argparse.Namespace, address: Address, secret: Secret | None) -> str:
    """The rate of answers, and the CPU seconds of both sides."""
    facts, targets = facts_of(args), targets_of(args)
    ids = torch.arange(args.tokens, dtype=torch.int32)
    bounds, labels = torch.tensor([0, args.tokens]).int(), None if targets is None else ids
    request = ForwardRequest(ids[None], ids[None], bounds, ids, labels, targets=targets)
    values = {"fingerprint": facts.fingerprint} | ({} if targets is None else {"targets": targets.values()})
    context = multiprocessing.get_context("spawn")
    found, stop = context.Queue(), context.Event()
    process = context.Process(target=serve, args=(args, address, secret, found, stop))
    process.start()
    connections = TeacherConnections([parse_address("address", found.get())], secret, facts, 1 << 31)
    submit = lambda: connections.submit(Message(Kind.FORWARD, 0, values, request.tensors))  # noqa: E731
    submit().result()
    began, began_cpu = time.perf_counter(), time.process_time()
    answers, received = deque(submit() for _ in range(UNDER_WAY)), 0
    for number in range(args.answers):
        (answer,) = answers.popleft().result().tensors
        received += answer.nbytes
        if number + UNDER_WAY < args.answers:
            answers.append(submit())
    elapsed, student_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    connections.close()
    stop.set()
    gigabytes, service_cpu = received / 1e9, found.get()
    process.join()
    return (
        f"{gigabytes / elapsed:5.2f} GB/s, {args.tokens * args.answers / elapsed:9,.0f} tokens/s, CPU seconds per GB: "
        f"student {student_cpu / gigabytes:.2f}, service {service_cpu / gigabytes:.2f}"
    )


def main() -> None:
    """Print one line for each kind of connection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of an answer")
    parser.add_argument("--width", type=int, default=4096, help="width of hidden states in bf16")
    parser.add_argument("--top-k", type=int, help="top-k targets in place of hidden states")
    parser.add_argument("--answers", type=int, default=40)
    args = parser.parse_args()
    tcp, secret = ServiceAddress("127.0.0.1", 0), Secret.of("secret of a benchmark")
    with tempfile.TemporaryDirectory() as folder:
        ipc = parse_address("TMPDIR", f"ipc://{folder}/teacher")
        for name, address, own in (("ipc", ipc, None), ("tcp", tcp, None), ("tcp, encrypted", tcp, secret)):
            print(f"{name:14}  {measure(args, address, own)}", flush=True)


if __name__ == "__main__":
    main()
