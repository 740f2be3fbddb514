"""`mkd train` with a teacher behind an inference server: a stand-in that computes the teacher of the small job."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.teacher.inference.known_text import NAME
from tests.support.e2e.small_job import VOCAB, SmallJob, make_small_job, run
from tests.support.inference_server import HFStates, StandIn, table_model

TOP_K = 8


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def server(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """It writes hidden states too, which most tests do not read."""
    model, files = HFStates(LlamaForCausalLM.from_pretrained(job.teacher)), tmp_path_factory.mktemp("states")
    options = dict(vocab=VOCAB, max_model_len=96, states=model.states, states_dir=files)
    with StandIn(model.log_probs, **options) as server:
        yield server


@pytest.mark.slow
def test_a_run_of_two_epochs(job: SmallJob, server: StandIn, tmp_path: Path) -> None:
    """The server fails in the middle: the job saves and ends with status 75. Resumed, it has the numbers of a teacher
    on its own ranks, and no text is sent twice, also not for the second epoch."""
    flags = {"--kd-packing": "best_fit", "--kd-epochs": 2, "--train-iters": None, "--kd-top-k": TOP_K}
    flags |= {"--save-interval": 1000, "--eval-interval": 3, "--split": "1,1,98"}
    online = run(job.flags({**flags, "--save": tmp_path / "online"}))
    assert online.status == 0, online.errors[-3000:]
    flags |= {"--kd-teacher-hf": None, "--kd-teacher-url": server.url, "--kd-teacher-cache": tmp_path / "kept"}
    flags |= {"--save": tmp_path / "served", "--load": tmp_path / "served", "--kd-teacher-timeout": 1}
    server.late_fault = (len(server.texts) + 40, "busy")
    ended = run(job.flags(flags))
    server.late_fault, server.fault = None, ""
    assert ended.status == 75, ended.output[-3000:] + ended.errors[-3000:]
    assert "503" in ended.output and "texts are sent again" in ended.output
    assert (tmp_path / "served" / TRACKER).exists()
    true_model, server.model = server.model, table_model(VOCAB)
    other = run(job.flags({**flags, "--kd-teacher-cache": None}))
    server.model = true_model
    assert other.status == 1 and f"is another teacher than that of --load {tmp_path}/served" in other.errors
    server.texts.clear()
    served = run(job.flags(flags))
    assert served.status == 0, served.output[-3000:] + served.errors[-3000:]
    assert f"t of vllm at {server.url}" in served.output
    _, (_, often) = Counter(map(tuple, server.texts[6:])).most_common(2)  # the most common one is the known text
    assert often == 1
    assert [line["iteration"] for line in served.metrics] == [line["iteration"] for line in online.metrics]
    for line, truth in zip(served.metrics, online.metrics, strict=True):
        for name in ("loss", "ce", "kd", "valid_kd", "valid_teacher_ce"):
            if name in truth:
                assert line[name] == pytest.approx(truth[name], rel=2e-3), name
    (tmp_path / "kept" / NAME).unlink()  # cp CACHE/* copies no such file
    lost = run(job.flags(flags))
    assert lost.status == 1 and "kept has answers of a server, but no .known_text.json" in lost.errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--kd-top-k": 30}, ["greater than max allowed: 20", "--max-logprobs 30"]),
        ({"--kd-top-k": None}, ["--kd-top-k K"]),
        ({"--seq-length": 128}, ["--seq-length 128", "94 tokens", "--max-model-len 130"]),
    ],
)
def test_refused(job: SmallJob, server: StandIn, changes: dict, words: list[str]) -> None:
    flags = {"--kd-teacher-hf": None, "--kd-teacher-url": server.url, "--kd-top-k": TOP_K, **changes}
    result = run(job.flags(flags))
    assert result.status == 1 and result.errors.count("\n") == 1, result.errors[-2000:]
    assert [word for word in words if word not in result.errors] == []


def states_flags(job: SmallJob, server: StandIn) -> dict[str, Any]:
    return {
        "--kd-teacher-hf": None,
        "--kd-teacher-url": server.url,
        "--kd-teacher-states-dir": server.states_dir,
        "--kd-teacher-head-hf": job.teacher,
    }


@pytest.mark.slow
def test_a_run_from_hidden_states(job: SmallJob, server: StandIn, tmp_path: Path) -> None:
    """Files do not come in the middle: the job saves and ends with status 75. Resumed, it has the numbers of a teacher
    on its own ranks, and the whole distribution; then the teacher on the ranks takes over."""
    for path in server.states_dir.iterdir():
        path.unlink()
    flags = {"--kd-packing": "best_fit", "--kd-loss": "jsd", "--kd-temperature": 2.0, "--train-iters": 6}
    flags |= {"--save-interval": 1000, "--eval-interval": 3}
    online = run(job.flags({**flags, "--save": tmp_path / "online"}))
    assert online.status == 0, online.errors[-3000:]
    served = states_flags(job, server) | {"--save": tmp_path / "served", "--load": tmp_path / "served"}
    server.late_fault = (len(server.texts) + 36, "not written")
    ended = run(job.flags({**flags, **served, "--kd-teacher-timeout": 1}))
    server.late_fault, server.fault = None, ""
    assert ended.status == 75, ended.output[-3000:] + ended.errors[-3000:]
    assert "without writing it: is the disk full" in ended.output + ended.errors
    assert 0 < len(ended.metrics) < len(online.metrics) and (tmp_path / "served" / TRACKER).exists()
    shorter = run(job.flags({**flags, **served, "--train-iters": 6, "--exit-interval": 5}))
    assert shorter.status == 0, shorter.output[-3000:] + shorter.errors[-3000:]
    assert f"hidden states of t of vllm at {server.url}" in shorter.output
    assert not list(server.states_dir.iterdir())
    own = {"--save": tmp_path / "served", "--load": tmp_path / "served"}
    last = run(job.flags({**flags, **own}))
    assert last.status == 0, last.output[-3000:] + last.errors[-3000:]
    assert [line["iteration"] for line in last.metrics] == [line["iteration"] for line in online.metrics]
    for line, truth in zip(last.metrics, online.metrics, strict=True):
        for name in ("loss", "ce", "kd", "valid_kd", "valid_teacher_ce", "valid_teacher_entropy"):
            if name in truth:
                assert line[name] == pytest.approx(truth[name], rel=2e-6), name


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        ("other layer", {}, ["do not give its own log-probabilities", "eagle_aux_hidden_state_layer_ids", "[4]"]),
        ("", {"--kd-teacher-states-dir": "nowhere"}, ["--kd-teacher-states-dir nowhere is not a folder"]),
    ],
)
def test_hidden_states_are_refused(
    job: SmallJob, server: StandIn, fault: str, changes: dict[str, Any], words: list[str]
) -> None:
    server.fault = fault
    result = run(job.flags({**states_flags(job, server), **changes}))
    server.fault = ""
    assert result.status == 1 and result.errors.count("\n") == 1, result.errors[-2000:]
    assert [word for word in words if word not in result.errors] == []
