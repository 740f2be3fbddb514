"""Losses and gradients with a teacher service equal those with the same teacher in process, to the last bit.

Without `-m slow`, each layout of a service meets each dimension of the student once; `-m slow` adds other pairs.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from signal import SIGSTOP
from time import sleep
from typing import Any

import pytest

from tests.dist.test_on_policy import in_layout, on_policy
from tests.dist.test_on_policy_xtoken import with_views
from tests.support.dist.kd_samples import ROWS
from tests.support.dist.kd_step import Layout, Models, kd_step
from tests.support.dist.outcome import GetPool, Outcome, assert_equal, assert_same
from tests.support.dist.served import (
    Service,
    assert_same_steps,
    impatient_run,
    served_error,
    served_on_policy,
    served_run,
)
from tests.support.slow import slow

TEXT = Models(teacher_layers=2, tied=False)
PACKED = replace(TEXT, data="packed", ratio=0.6)
PAIRS = replace(TEXT, data="packed pairs", xtoken="partition_kl", mixed=True, select=True)
ONE, TP2 = Layout(), Layout(tp=2, sp=True)

# fmt: off
TABLE = {
    "one rank, text / one rank": (1, Layout(), TEXT, ONE),
    "dp2-cp2, packed / tp2": (4, Layout(cp=2), PACKED, TP2),
}
MORE = {
    "tp2-pp2 / one rank": (4, Layout(tp=2, pp=2, sp=True), TEXT, ONE),
    "dp2-cp2, packed / one rank": (4, Layout(cp=2), PACKED, ONE),
    "tp2-cp2 / tp2": (4, Layout(tp=2, cp=2), TEXT, TP2),
}
# fmt: on
"""Student / service: ranks and layout of the student, models, layout of the service."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """A running service of a layout; each is started once."""
    known: dict[tuple[Layout, Models], Service] = {}

    def of(layout: Layout, models: Models = TEXT) -> Service:
        if (layout, models) not in known:
            known[layout, models] = Service(tmp_path_factory.mktemp("service"), layout, models)
            known[layout, models].start()
        return known[layout, models]

    yield of
    for service in known.values():
        service.stop()
        service.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """`service(**options)`: one that is not shared."""
    made: list[Service] = []

    def make(**options: object) -> Service:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Service(folder, models=TEXT, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def address(service: Service) -> str:
    return f"tcp://127.0.0.1:{service.port}"


@cache
def in_process(pools: GetPool, ranks: int, student: Layout, models: Models, service: Layout) -> Outcome:
    """Taught by the same teacher in the service's layout, on the student's ranks. Each is computed once."""
    return Outcome.of(pools, ranks, with_teacher_of(student, service), models)


def with_teacher_of(student: Layout, service: Layout) -> Layout:
    """The student's layout with the teacher on its ranks in the service's layout."""
    is_same = (student.tp, student.pp, student.cp) == (service.tp, service.pp, service.cp)
    return student if is_same else replace(student, teacher=service)


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_layouts(gloo_pool: GetPool, services: Callable[..., Service], name: str) -> None:
    ranks, student, models, own = (TABLE | MORE)[name]
    served = replace(models, served=(address(services(own)),), ahead=1)
    seen = Outcome.of(gloo_pool, ranks, student, served, run=served_run)
    assert_equal(seen, in_process(gloo_pool, ranks, student, models, own))


WRITTEN = {
    "one rank": (1, Layout(mbs=1), TEXT),
    "dp2": (2, Layout(mbs=1), TEXT),
}
MORE_WRITTEN = {
    "cp2": (2, Layout(cp=2, mbs=1), TEXT),
    "tp2-pp2": (4, Layout(tp=2, pp=2, sp=True, mbs=1), TEXT),
    "dp2, packed": (2, Layout(mbs=1), PACKED),
}


@pytest.mark.parametrize("name", [*WRITTEN, *slow(MORE_WRITTEN)])
def test_texts_are_sent_while_others_are_written(
    gloo_pool: GetPool, services: Callable[..., Service], name: str
) -> None:
    """Two texts at a time on each rank, of six; rows of given texts are sent before the first one. The numbers are
    those of the teacher in process in the service's layout, which waits for all texts."""
    ranks, student, models = (WRITTEN | MORE_WRITTEN)[name]
    packed = models is PACKED
    policy = in_layout(on_policy(0.75, packed, cache_tokens=64 * student.pp * student.tp), student)
    served = replace(models, served=(address(services(ONE)),), ahead=1)
    seen = gloo_pool(ranks).run(served_on_policy, student, served, policy)
    truth = gloo_pool(ranks).run(kd_step, with_teacher_of(student, ONE), models, policy)
    assert_same_steps(seen, truth)
    senders = [one["events"] for one in seen if "sent" in one["events"]]
    assert len(senders) == ranks // (student.tp * student.pp * student.cp)
    for events in senders:
        assert events.count("sent") == ROWS // len(senders), "each microbatch once"
        first, last = events.index("text"), len(events) - 1 - events[::-1].index("text")
        assert first == events[:first].count("sent") < events[:last].count("sent"), "given texts, then written ones"


def test_written_texts_in_the_tokens_of_another_tokenizer(gloo_pool: GetPool, services: Callable[..., Service]) -> None:
    models, policy = replace(TEXT, data="pairs", xtoken=PAIRS.xtoken), with_views(0.75)
    policy = replace(policy, decoding=replace(policy.decoding, cache_tokens=64))
    served = replace(models, served=(address(services(ONE, replace(TEXT, xtoken=PAIRS.xtoken))),), ahead=1)
    seen = gloo_pool(1).run(served_on_policy, Layout(mbs=1), served, policy)
    assert_same_steps(seen, gloo_pool(1).run(kd_step, Layout(mbs=1), models, policy))
    events = seen[0]["events"]
    assert "text" in events[events.index("sent") :], "some are sent while texts are written"


@pytest.mark.parametrize("name", ["dp2-cp2, packed / tp2", *slow(["tp2-pp2 / one rank", "tp2-cp2 / tp2"])])
def test_top_k_targets(gloo_pool: GetPool, services: Callable[..., Service], name: str) -> None:
    """As --kd-top-k with the teacher in process; what is computed from its whole distribution is not reported."""
    ranks, student, models, own = (TABLE | MORE)[name]
    models = replace(models, top_k=8)
    served = replace(models, served=(address(services(own)),), ahead=1, targets="top_k")
    seen = Outcome.of(gloo_pool, ranks, student, served, run=served_run)
    assert_same_top_k(seen, in_process(gloo_pool, ranks, student, models, own))


def assert_same_top_k(seen: Outcome, truth: Outcome) -> None:
    """The same, but for what is computed from the whole distribution."""
    kept = [{name: report[name] for name in own} for report, own in zip(truth.reports, seen.reports, strict=True)]
    missing = set().union(*truth.reports) - set().union(*seen.reports)
    assert {name.partition("_")[0] for name in missing} == {"teacher"} and all("entropy" in name for name in missing)
    assert_same(seen, replace(truth, reports=kept))


@pytest.mark.slow
def test_sampled_targets(gloo_pool: GetPool, services: Callable[..., Service]) -> None:
    """The same samples in every layout, as their random numbers depend on the text only."""
    seen = []
    for ranks, student, models, own in (TABLE["dp2-cp2, packed / tp2"], (1, Layout(), PACKED, ONE)):
        served = replace(models, served=(address(services(own)),), ahead=1, targets="sampled")
        seen.append(Outcome.of(gloo_pool, ranks, student, served, run=served_run))
    assert_same(*seen)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["select", "both"])
def test_top_k_targets_of_several_teachers(gloo_pool: GetPool, services: Callable[..., Service], how: str) -> None:
    student, models = Layout(tp=2, sp=True), replace(TEXT, top_k=8, **{how: True})
    addresses = tuple(address(services(ONE, replace(TEXT, salt=salt))) for salt in "AB")
    served = replace(models, served=addresses, ahead=1, targets="top_k")
    seen = Outcome.of(gloo_pool, 2, student, served, run=served_run)
    assert_same_top_k(seen, in_process(gloo_pool, 2, student, models, ONE))


@pytest.mark.slow
def test_several_teachers_and_another_tokenizer(gloo_pool: GetPool, services: Callable[..., Service]) -> None:
    """Each text is taught by the better one of two services, of which one has another tokenizer."""
    student = Layout(tp=2, sp=True, mbs=4)
    addresses = tuple(address(services(ONE, models)) for models in (TEXT, replace(TEXT, xtoken=PAIRS.xtoken)))
    served = replace(PAIRS, served=addresses, ahead=1)
    seen = Outcome.of(gloo_pool, 2, student, served, run=served_run)
    assert_equal(seen, in_process(gloo_pool, 2, student, PAIRS, ONE))


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("one rank, text / one rank", 0),
        ("one rank, text / one rank", 4),
        pytest.param("tp2-pp2 / one rank", 0, marks=pytest.mark.slow),
        pytest.param("tp2-pp2 / one rank", 4, marks=pytest.mark.slow),
    ],
)
def test_running_ahead_changes_no_number(
    gloo_pool: GetPool, services: Callable[..., Service], name: str, ahead: int
) -> None:
    ranks, student, models, own = (TABLE | MORE)[name]
    served = replace(models, served=(address(services(own)),), ahead=ahead)
    assert_equal(
        Outcome.of(gloo_pool, ranks, student, served, run=served_run),
        in_process(gloo_pool, ranks, student, models, own),
    )


def test_killed_services_change_no_number(gloo_pool: GetPool, service: Callable[..., Service]) -> None:
    """Two addresses: a service that is killed and stays dead, and one that is killed and started again, twice."""
    two = [service(answers=2), service(answers=3)]
    models = replace(TEXT, served=tuple(one.start() for one in two))
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(Outcome.of, gloo_pool, 1, Layout(mbs=1), models, run=served_run)
        two[0].join()
        for answers in (3, None):
            two[1].join()
            two[1].answers = answers
            two[1].start()
        seen = run.result()
    assert two[1].stop() > [(0, 0)]
    assert_equal(seen, in_process(gloo_pool, 1, Layout(mbs=1), TEXT, ONE))


def test_socket_file_of_a_killed_service(gloo_pool: GetPool, service: Callable[..., Service]) -> None:
    """A service at a socket file, started again after a kill: the numbers are those of the teacher in process."""
    local = service(answers=2, is_local=True)
    models = replace(TEXT, served=(local.start(),))
    assert models.served[0].startswith("ipc:///")
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(Outcome.of, gloo_pool, 1, Layout(mbs=1), models, run=served_run)
        local.join()
        local.answers = None
        local.start()
        seen = run.result()
    assert_equal(seen, in_process(gloo_pool, 1, Layout(mbs=1), TEXT, ONE))


@pytest.mark.parametrize(
    ("run", "pause_s"), [(impatient_run, 1.5), pytest.param(served_run, 30.0, marks=pytest.mark.slow)]
)
def test_paused_service_changes_no_number(
    gloo_pool: GetPool, service: Callable[..., Service], run: Callable[..., Any], pause_s: float
) -> None:
    """A pause, until the connection counts as lost, while answers to later steps have been requested."""
    one = service(answers=5, last_signal=SIGSTOP)
    models = replace(TEXT, served=(one.start(),), ahead=4)
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(Outcome.of, gloo_pool, 1, Layout(mbs=1), models, run=run)
        while not one.is_paused():
            sleep(0.02)
        sleep(pause_s)
        assert not outcome.done()
        one.go_on()
        seen = outcome.result()
    assert_equal(seen, in_process(gloo_pool, 1, Layout(mbs=1), TEXT, ONE))


@pytest.mark.parametrize("stopping_rank", [0, 1])
def test_signal_ends_a_wait_on_all_ranks(
    gloo_pool: GetPool, service: Callable[..., Service], stopping_rank: int
) -> None:
    models = replace(TEXT, served=(service(fault="silent").start(),), answer_s=600.0)
    errors = gloo_pool(2).run(served_error, Layout(tp=2), models, stopping_rank)
    assert errors == ["WaitAborted: "] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("NaN", r"MkdNumericError: the hidden states of the teacher .* are not finite"),
        ("truncated", r"MkdTeacherError: the teacher answers with hidden states of .*; \d+ tokens .* were requested"),
        ("silent", r"MkdTeacherTimeout: the teacher has not answered for . s \(--kd-teacher-timeout 1\)"),
    ],
)
def test_wrong_answers_are_errors_on_all_ranks(
    gloo_pool: GetPool, service: Callable[..., Service], fault: str, message: str
) -> None:
    models = replace(TEXT, served=(service(fault=fault).start(),), answer_s=1.0)
    errors = gloo_pool(2).run(served_error, Layout(tp=2), models)
    assert len(set(errors)) == 1
    assert re.search(message, errors[0]), errors[0]


def test_two_students_share_a_service(gloo_pool: GetPool, services: Callable[..., Service]) -> None:
    models = replace(TEXT, served=(address(services(ONE)),))
    with ThreadPoolExecutor(2) as threads:
        layouts = {1: Layout(), 4: MORE["tp2-pp2 / one rank"][1]}
        runs = {
            ranks: threads.submit(Outcome.of, gloo_pool, ranks, layout, models, run=served_run)
            for ranks, layout in layouts.items()
        }
        seen = {ranks: run.result() for ranks, run in runs.items()}
    for ranks, layout in layouts.items():
        assert_equal(seen[ranks], in_process(gloo_pool, ranks, layout, TEXT, ONE))
