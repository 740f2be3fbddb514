"""`mkd train` whose texts an inference server writes: a stand-in that samples from the folders that the job writes."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.test_resume import Attempts
from tests.support.e2e.small_job import VOCAB, SmallJob, free_port, make_small_job, run
from tests.support.inference_server import LogProbs, StandIn

TOKENS = 6


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def model_in(folder: Path | str) -> LogProbs:
    model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def log_probs(ids: Sequence[int]) -> np.ndarray:
        return model(torch.tensor([list(ids)])).logits[0].log_softmax(-1).double().numpy()

    return log_probs


@pytest.fixture
def server(job: SmallJob) -> Iterator[StandIn]:
    with started(job) as server:
        yield server


def started(job: SmallJob, api: str = "vllm") -> StandIn:
    server = StandIn(model_in(job.student), api, vocab=VOCAB, max_model_len=96)
    server.load = model_in
    return server


def on_policy_flags(folder: Path, **more: Any) -> dict[str, Any]:
    """Half of the rows are the student's, its most probable tokens."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("The import", "A class is", "x")))
    flags = {"--kd-on-policy": 0.5, "--kd-prompts": prompts, "--kd-rollout-tokens": TOKENS, "--lr": 2e-3}
    return flags | {"--kd-rollout-temperature": 0, "--kd-loss": "reverse_kl"} | more


@pytest.mark.slow
def test_greedy_texts_are_those_of_the_training_ranks(job: SmallJob, server: StandIn, tmp_path: Path) -> None:
    """Losses, weights and optimizer are bit-equal, although the server fails in step 6: the job saves and ends with
    status 75, and is resumed with a server that has the first weights again."""
    flags = on_policy_flags(tmp_path)
    own = Attempts(job, tmp_path / "own", flags)
    expected = own.finished()
    flags |= {"--kd-rollout-url": f"{server.url}/v1", "--kd-rollout-timeout": 2}
    served = Attempts(job, tmp_path / "served", flags)
    server.late_fault = (10, "busy")  # two texts per rollout show the weights
    ended = served.start()
    assert ended.status == 75, ended.output[-3000:] + ended.errors[-3000:]
    assert "no server of --kd-rollout-url has answered for" in ended.output and "status 503" in ended.output
    assert re.search(
        r"servers +50% of the rows from .*: http://.*, new weights in .*/rollout after every", ended.output
    )
    folders = tmp_path / "served" / "rollout"
    assert server.loaded == [f"{folders}/step_000000{step}" for step in range(5)]
    server.late_fault, server.fault, server.model = None, "", model_in(job.student)
    result = served.finished()
    served.assert_like((own.save, expected), result)
    assert server.loaded[5:] == [f"{folders}/step_000000{step}" for step in range(5, 8)]
    left = ["hf_assets", "step_0000007", "texts_0000006.json", "texts_0000007.json", "writing_job.txt"]
    assert sorted(path.name for path in folders.iterdir()) == left
    assert (folders / "step_0000007" / "tokenizer.json").is_file()
    assert [line["written_age"] for line in result.metrics if "grad_norm" in line] == [0] * 8


@pytest.mark.slow
def test_a_killed_job_learns_from_its_texts_again(job: SmallJob, tmp_path: Path) -> None:
    """Killed in iteration 5, continued from 4: the server had written the texts of iteration 5."""
    with started(job, "sglang") as server:
        flags = on_policy_flags(tmp_path, **{"--kd-rollout-temperature": 1, "--kd-rollout-url": server.url})
        served = Attempts(job, tmp_path / "save", flags)
        served.killed("step:9")
        written = len(server.written)
        result = served.finished()
        assert "the texts of iteration 5 are those that --kd-rollout-url has written before" in result.output
        assert written == 5 * 2 and len(server.written) == 8 * 2
        assert [line["written_age"] for line in result.metrics if "grad_norm" in line] == [0] * 8
        assert [path.split("_")[-1] for path in server.loaded] == [f"000000{step}" for step in range(8)]
        left = {"hf_assets", "step_0000007", "texts_0000006.json", "texts_0000007.json", "writing_job.txt"}
        assert {path.name for path in (tmp_path / "save" / "rollout").iterdir()} == left


@pytest.mark.slow
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_sampled_texts_with_weights_for_several_steps(job: SmallJob, tmp_path: Path, api: str) -> None:
    """Killed in iteration 5, continued from 4, whose texts iteration 4 has written too: those are learned from."""
    with started(job, api) as server:
        flags = on_policy_flags(tmp_path, **{"--kd-rollout-temperature": 1, "--kd-rollout-top-p": 0.9})
        flags |= {"--kd-rollout-url": server.url, "--kd-rollout-steps": 3, "--kd-rollout-refresh": 4}
        flags |= {"--kd-rollout-weights": tmp_path / "weights"}
        served = Attempts(job, tmp_path / "save", flags)
        served.killed("step:9")
        written = len(server.written)
        result = served.finished()
        trained = [line for line in result.metrics if "grad_norm" in line]
        # Rollouts before steps 1, 4 and 7: weights of step 0 are 3 steps old before step 4; a resumed job has new ones.
        assert [line["written_age"] for line in trained] == [0, 1, 2, 3, 4, 5, 0, 1]
        assert [path.split("_")[-1] for path in server.loaded] == ["0000000", "0000006"]
        assert written == 12 and len(server.written) == 12 + 6, "the texts of steps 5 and 6 were in the checkpoint"
        assert {body["seed"] if api == "vllm" else body["sampling_params"]["sampling_seed"] for body in server.bodies}


def test_the_weights_are_compared_in_each_step(job: SmallJob, server: StandIn, tmp_path: Path) -> None:
    """The server loads them four times, and from then on only logs that."""
    server.late_fault = (8, "keeps")  # two texts per rollout show the weights
    flags = on_policy_flags(tmp_path) | {"--save": tmp_path / "save", "--save-interval": 100, "--lr": 1e-2}
    flags |= {"--lr-decay-style": "constant", "--kd-rollout-url": server.url, "--train-iters": 9, "--eval-iters": 0}
    result = run(job.flags(flags))
    assert result.status == 1 and result.errors.count("\n") == 1, result.output[-3000:] + result.errors[-3000:]
    assert re.search(r"has kept its weights|has other weights than the student after it has loaded", result.errors)
    assert [line["iteration"] for line in result.metrics if "grad_norm" in line] == [1, 2, 3, 4]
    assert len(server.loaded) == 5


@pytest.mark.slow  # waits for ten seconds
def test_nobody_is_there(job: SmallJob, tmp_path: Path) -> None:
    """Before the work, also in a dry run."""
    flags = on_policy_flags(tmp_path) | {"--save": tmp_path / "save", "--save-interval": 100, "--kd-dry-run": True}
    result = run(job.flags({**flags, "--kd-rollout-url": f"http://127.0.0.1:{free_port()}"}))
    assert result.status == 75 and result.errors.count("\n") == 1, result.errors[-3000:]
    assert "--kd-rollout-url http://127.0.0.1" in result.errors and "no inference server answers there" in result.errors
