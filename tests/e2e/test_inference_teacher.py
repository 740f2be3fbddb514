"""`mkd train` with a teacher behind an inference server: a stand-in that computes the teacher of the small job."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from mkd.checkpoint.megatron_folder import TRACKER
from tests.support.e2e.small_job import VOCAB, SmallJob, make_small_job, run
from tests.support.inference_server import StandIn, table_model

TOP_K = 8


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def server(job: SmallJob) -> Iterator[StandIn]:
    model = LlamaForCausalLM.from_pretrained(job.teacher)

    @torch.no_grad()
    def log_probs(ids: Sequence[int]) -> np.ndarray:
        return model(torch.tensor([list(ids)])).logits[0].log_softmax(-1).double().numpy()

    with StandIn(log_probs, vocab=VOCAB, max_model_len=96) as server:
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
