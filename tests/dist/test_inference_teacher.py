"""Losses and gradients from an inference server are the same in every layout, and those from the cache that its answers
fill. From hidden states they are those of the same teacher in process."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.dist.test_on_policy import on_policy
from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import TEACHER, Layout, Models
from tests.support.dist.outcome import GetPool, Outcome, assert_equal, assert_same
from tests.support.dist.served import assert_same_steps, served_error, served_on_policy, served_run
from tests.support.inference_server import HFStates, StandIn, table_model
from tests.support.slow import slow


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


def test_texts_are_sent_while_others_are_written(gloo_pool: GetPool, models: Models) -> None:
    """Two texts at a time on each of two ranks, of three; the numbers are those where all are sent after the last."""
    layout, policy = Layout(mbs=1), on_policy(0.75, cache_tokens=64)
    models = replace(models, data="text")
    early, late = (gloo_pool(2).run(served_on_policy, layout, models, policy, early) for early in (True, False))
    assert_same_steps(early, late)
    for one, other in zip(early, late, strict=True):
        events, after = one["events"], other["events"]
        assert after[0] == "written" and events.count("sent") == after.count("sent")
        first, last = events.index("text"), len(events) - 1 - events[::-1].index("text")
        assert first == events[:first].count("sent") < events[:last].count("sent"), "given texts, then written ones"


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


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StandIn, Models]]:
    """A server of hidden states of the small teacher, and the models with the folder of the teacher."""
    root = tmp_path_factory.mktemp("states")
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=TEACHER["hidden_size"],
        intermediate_size=TEACHER["ffn_hidden_size"],
        num_hidden_layers=TEACHER["num_layers"],
        num_attention_heads=TEACHER["num_attention_heads"],
        num_key_value_heads=TEACHER["num_query_groups"],
        head_dim=TEACHER["kv_channels"],
        rope_parameters={"rope_type": "default", "rope_theta": float(TEACHER["rotary_base"])},
        rms_norm_eps=TEACHER["layernorm_epsilon"],
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, tie_word_embeddings=False)).eval()
    for name, values in model.named_parameters():
        values.data.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.15)
    model.save_pretrained(root / "teacher")
    (root / "files").mkdir()
    computed, options = HFStates(model), dict(vocab=VOCAB, max_model_len=66)
    with StandIn(computed.log_probs, states=computed.states, states_dir=root / "files", **options) as server:
        yield (
            server,
            Models(data="packed", tied=False, folder=str(root / "teacher"), answer_s=20.0),
        )


STUDENTS = {"tp2-pp2": Layout(tp=2, pp=2, sp=True)}
MORE = {"tp2-cp2": Layout(tp=2, cp=2)}


@pytest.mark.parametrize("student", [*STUDENTS, *slow(MORE)])
def test_hidden_states(gloo_pool: GetPool, states: tuple[StandIn, Models], student: str) -> None:
    """Whole distributions, at a temperature, in the student's layout: those of the teacher in process."""
    server, models = states
    truth = Outcome.of(gloo_pool, 1, Layout(), models)
    served = replace(models, served=(server.url,), states=str(server.states_dir))
    assert_same(Outcome.of(gloo_pool, 4, (STUDENTS | MORE)[student], served, run=served_run), truth)
    assert not list(server.states_dir.iterdir())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("NaN states", "MkdNumericError: .* not finite"),
        ("not written", "MkdTeacherTimeout: .*without writing it: is the disk full"),
        ("other layer", "MkdTeacherError: .*do not give its own log-probabilities"),
    ],
)
def test_errors_of_hidden_states(gloo_pool: GetPool, states: tuple[StandIn, Models], fault: str, words: str) -> None:
    """All ranks raise them, before the step."""
    server, models = states
    server.texts.clear()
    server.late_fault = (10, fault)
    served = replace(models, served=(server.url,), states=str(server.states_dir), answer_s=5.0)
    errors = gloo_pool(2).run(served_error, Layout(tp=2), served)
    server.late_fault, server.fault = None, ""
    assert len(set(errors)) == 1
    assert re.search(words, errors[0]), errors[0]
