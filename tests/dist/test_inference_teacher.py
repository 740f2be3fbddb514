"""Losses and gradients from an inference server are the same in every layout, and those from the cache that its answers
fill."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome, assert_equal, assert_same
from tests.support.dist.served import served_error, served_run
from tests.support.inference_server import StandIn, table_model


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with StandIn(table_model(VOCAB), vocab=VOCAB, max_model_len=66) as server:
        yield server


@pytest.fixture(scope="module")
def models(server: StandIn) -> Models:
    return Models(served=(server.url,), top_k=6, temperature=1.0, data="padded", answer_s=20.0)


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool, models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Models]:
    """The outcome on one rank, and the models with the folder that it wrote."""
    models = replace(models, cache=str(tmp_path_factory.mktemp("cache") / "kept"))
    return Outcome.of(gloo_pool, 1, Layout(), models, run=served_run), models


def test_layouts(gloo_pool: GetPool, models: Models, one_rank: tuple[Outcome, Models]) -> None:
    """Tensor and context parallel, with packed rows, and running ahead further."""
    packed = replace(models, data="packed", ahead=3)
    seen = Outcome.of(gloo_pool, 4, Layout(tp=2, cp=2), packed, run=served_run)
    assert_same(seen, one_rank[0])


def test_answers_are_kept(gloo_pool: GetPool, server: StandIn, one_rank: tuple[Outcome, Models]) -> None:
    """A second run sends no text but those of the test of the server; the cache alone gives the same numbers."""
    truth, models = one_rank
    server.texts.clear()
    again = Outcome.of(gloo_pool, 1, Layout(), models, run=served_run)
    assert len({tuple(text) for text in server.texts}) <= 4
    assert_equal(again, truth)
    cached = Outcome.of(gloo_pool, 1, Layout(), replace(models, served=()))
    assert_equal(cached, truth)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("NaN", "MkdNumericError: .* are not finite"), ("busy", "MkdTeacherTimeout: the teacher has not answered for")],
)
def test_errors_are_those_of_all_ranks(
    gloo_pool: GetPool, server: StandIn, models: Models, fault: str, words: str
) -> None:
    """The fault begins in the step, after the test of the server."""
    server.texts.clear()
    server.late_fault = (7, fault)
    errors = gloo_pool(2).run(served_error, Layout(tp=2), replace(models, answer_s=1.0))
    server.late_fault, server.fault = None, ""
    assert len(set(errors)) == 1
    assert re.search(words, errors[0]), errors[0]
