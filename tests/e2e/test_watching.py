"""While a job trains: samples, epochs and kept checkpoints leave the training as it is; another layout continues it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mkd.checkpoint.megatron.folder import TRACKER
from tests.e2e.test_resume import SHARDED, Attempts, steps, tensors
from tests.support.e2e.small_job import Result, SmallJob, make_small_job, run

PIPELINE = {"--pipeline-model-parallel-size": 2, "--eval-iters": 1, "--eval-interval": 3}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def test_samples_epochs_and_kept_checkpoints_do_not_change_the_training(job: SmallJob, tmp_path: Path) -> None:
    """To the last bit, with dropout."""
    plain = Attempts(job, tmp_path / "plain", PIPELINE, ranks=2)
    whole = plain.finished()
    rows = int(re.search(r"training .* about (\d+) rows", whole.output)[1])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("The import", "A class is", "x")))
    flags = {**PIPELINE, "--train-iters": None, "--kd-epochs": 8 * 4 / rows, "--kd-keep-last": 2}
    flags |= {"--kd-sample-prompts": prompts, "--kd-sample-tokens": 4}
    tasks = tmp_path / "tasks.jsonl"
    answers = [{"answer": ".", "match": "regex"}, {"answer": "no student writes this"}]
    tasks.write_text("".join(json.dumps({"prompt": "The import", **answer}) + "\n" for answer in answers))
    flags |= {"--kd-eval-tasks": tasks, "--kd-eval-tokens": 4}
    flags |= {"--kd-keep-best": "accuracy", "--save-interval": 3, "--kd-keep-last": 1}
    watched = Attempts(job, tmp_path / "watched", flags, ranks=2)
    result = watched.finished()
    watched.assert_like((plain.save, whole), result)
    assert f"of about {rows:,} rows are 8 iterations of 4 rows" in result.output
    # The newest one, and the first of three with equal accuracies.
    assert sorted(path.name for path in watched.save.glob("iter_*")) == ["iter_0000003", "iter_0000008"]
    assert json.loads((watched.save / "best_checkpoint.json").read_text())["iteration"] == 3
    found = [line for line in result.metrics if "samples" in line]
    assert [line["iteration"] for line in found] == [0, 3, 6, 8]
    for line in found:
        assert [sample["prompt"] for sample in line["samples"]] == ["The import", "A class is", "x"]
        assert all(1 <= sample["tokens"] <= 4 for sample in line["samples"])
    assert "sample 2 at iteration 8: A class is => " in result.output
    accuracies = {line["iteration"]: line["valid_accuracy"] for line in result.metrics if "valid_accuracy" in line}
    assert accuracies == dict.fromkeys((0, 3, 6, 8), 0.5)
    assert "accuracy 50.0% (" in result.output and re.search(r"student at iteration 8 .* 50.0%", result.output)
    assert re.search(r"writes +samples of .*, answers to .*: with cached keys and values", result.output)
    assert "start from random" not in result.output


def on_policy_flags(folder: Path) -> dict[str, Any]:
    """Half of the rows are the student's."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("The import", "A class is", "x")))
    flags = {"--pipeline-model-parallel-size": 2, "--kd-on-policy": 0.5, "--kd-prompts": prompts}
    return flags | {"--kd-rollout-tokens": 6, "--kd-loss": "reverse_kl"}


def lengths(result: Result) -> list[float]:
    """Mean length of the texts of each step."""
    return [line["written_tokens"] for line in result.metrics if "written_tokens" in line]


SEVERAL_STEPS = {
    "--kd-on-policy": None,
    "--kd-on-policy-schedule": "linear:0.25:0.75:4",
    "--kd-rollout-steps": 3,
    "--kd-rollout-samples": 2,
    "--kd-rollout-top-p": 0.9,
    "--kd-rollout-stop": ["e"],
    "--kd-rollout-cut-off": "drop",
    "--kd-position-weight": 8,
    "--kd-compare-interval": 4,
}


@pytest.mark.parametrize("more", [SEVERAL_STEPS, pytest.param({}, marks=pytest.mark.slow)], ids=["steps", "plain"])
def test_a_resumed_job_writes_the_same_texts(job: SmallJob, tmp_path: Path, more: dict[str, Any]) -> None:
    """Killed in iteration 5, continued from 4, whose texts iteration 4 has written too; with its optimizer's state on
    the host meanwhile, which the undisturbed job keeps on the device."""
    flags = on_policy_flags(tmp_path) | more
    whole = Attempts(job, tmp_path / "whole", flags, ranks=2)
    other = Attempts(job, tmp_path / "other", flags | {"--kd-rollout-offload": True}, ranks=2)
    undisturbed = whole.finished()
    other.killed("step:9")
    result = other.finished()
    assert lengths(result) == lengths(undisturbed) and len(lengths(result)) == 8
    other.assert_like((whole.save, undisturbed), result)
    assert re.search(r"offload +optimizer state in host memory while texts are written, \d+\.\d+ GB", result.output)
    share = "a share of the rows, linear from 0.25 to 0.75 over 4 iterations," if more else "50% of the rows"
    assert re.search(rf"writes +{share} from .*: with cached keys and values", undisturbed.output)
    assert re.search(r"written +\d+\.\d tokens, .* cut off, .* time: .*rollout +\d+%", undisturbed.output)
    trained = [line for line in result.metrics if "grad_norm" in line]
    ages = [line["written_age"] for line in trained]
    assert ages == ([0, 1, 2, 0, 1, 2, 0, 1] if more else [0] * 8)
    learned = [line for line in trained if not (more and line["written_cut_off"] == 1.0)]
    assert learned and all(line["kd_first_64"] > 0.0 for line in learned)
    assert not any("kd_next_256" in line for line in trained)
    if more:
        compared = [line for line in learned if "written_overlap" in line]
        assert compared and {line["iteration"] for line in compared} == {line["iteration"] for line in learned} & {4, 8}
        assert all(0.0 < line["written_overlap"] < 1.0 and line["written_entropy"] > 0.0 for line in compared)


def test_parameters_that_are_gathered_late_write_the_same_texts(job: SmallJob, tmp_path: Path) -> None:
    """With --overlap-param-gather the parameters of a step arrive during its first forward pass."""
    runs = []
    common = {"--use-distributed-optimizer": True, "--pipeline-model-parallel-size": None, "--lr": 1e-2}
    common |= {"--kd-rollout-stop": ["e"]}
    for number, flags in enumerate(({}, {"--overlap-grad-reduce": True, "--overlap-param-gather": True})):
        changes = on_policy_flags(tmp_path) | common | flags | {"--kd-metrics-file": tmp_path / f"{number}.jsonl"}
        result = run(job.flags(changes), ranks=2)
        assert result.status == 0, result.errors[-3000:]
        runs.append((steps(result), lengths(result)))
    assert runs[0] == runs[1] and len(set(runs[0][1])) > 1


def models_that_repeat(job: SmallJob, folder: Path) -> dict[str, Path]:
    """Copies of both models: the teacher's most probable next token is always the present one, the student's
    sometimes."""
    for name, source in (("teacher", job.teacher), ("student", job.student)):
        model = AutoModelForCausalLM.from_pretrained(source)
        with torch.no_grad():
            if name == "student":
                model.model.embed_tokens.weight.mul_(2.5)
            else:
                for layer in model.model.layers:
                    layer.self_attn.o_proj.weight.zero_()
                    layer.mlp.down_proj.weight.zero_()
                model.lm_head.weight.copy_(5.0 * model.model.embed_tokens.weight)
        model.save_pretrained(folder / name)
        for file in source.glob("tokenizer*"):
            shutil.copy(file, folder / name)
    return {f"--kd-{name}-hf": folder / name for name in ("teacher", "student")}


def collapse_flags(job: SmallJob, tmp_path: Path) -> dict[str, Any]:
    """A job whose teacher rewards endless repetition."""
    flags = on_policy_flags(tmp_path) | {"--pipeline-model-parallel-size": None, "--kd-on-policy": 1}
    flags |= models_that_repeat(job, tmp_path)
    flags |= {"--kd-ratio": 1, "--train-iters": 20, "--lr": 2e-2, "--lr-decay-style": "constant", "--eval-iters": 0}
    flags |= {"--kd-rollout-tokens": 16, "--kd-rollout-guard": "stop", "--kd-rollout-most-cut-off": 1}
    return flags | {"--kd-allow-bad-teacher": True, "--save": tmp_path / "save", "--save-interval": 100}


RUNS_AWAY = r"the texts that the student writes run away: at iteration (\d+), and in the 2"


def test_a_collapse_is_noticed(job: SmallJob, tmp_path: Path) -> None:
    """The job ends within 20 steps, before the texts are learned."""
    result = run(job.flags(collapse_flags(job, tmp_path)))
    assert result.status == 1, result.output[-3000:]
    found = re.search(RUNS_AWAY, result.errors)
    assert found and int(found[1]) <= 20 and "Traceback" not in result.errors
    repeated = [line["written_repeated"] for line in result.metrics if "grad_norm" in line]
    assert len(repeated) == int(found[1]) - 1 and repeated[0] < 0.2 and min(repeated[-2:]) > 0.5


@pytest.mark.slow
def test_a_collapse_is_noticed_at_the_same_iteration_after_a_restart(job: SmallJob, tmp_path: Path) -> None:
    flags = collapse_flags(job, tmp_path) | {"--save-interval": 1}
    first, again = run(job.flags(flags)), run(job.flags(flags | {"--load": tmp_path / "save"}))
    assert first.status == again.status == 1, again.output[-3000:]
    assert re.search(RUNS_AWAY, again.errors)[1] == re.search(RUNS_AWAY, first.errors)[1]


@pytest.mark.slow
def test_killed_while_it_writes_scores_and_trains_on_packed_rows(job: SmallJob, tmp_path: Path) -> None:
    flags = on_policy_flags(tmp_path) | {"--kd-packing": "best_fit", "--kd-packing-multiple": 8}
    whole, other = (Attempts(job, tmp_path / name, flags, ranks=2) for name in ("whole", "other"))
    undisturbed = whole.finished()
    for kill in ("write:30", "score:3", "step:5"):
        other.killed(kill)
    result = other.finished()
    assert lengths(result) == lengths(undisturbed) and len(lengths(result)) == 8
    other.assert_like((whole.save, undisturbed), result)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"--tensor-model-parallel-size": 2, "--sequence-parallel": True}, id="tp2"),
        pytest.param({"--pipeline-model-parallel-size": 2}, id="pp2", marks=pytest.mark.slow),
    ],
)
def test_another_layout_continues_with_the_optimizer(job: SmallJob, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Saved under DP 2; continued under TP 2 with sequence parallelism, or under PP 2."""
    quiet = {"--attention-dropout": 0.0, "--save-interval": 4}  # masks of dropout depend on the layout
    whole = Attempts(job, tmp_path / "whole", {**SHARDED, **quiet}, ranks=2)
    expected = whole.finished()
    save = tmp_path / "moved"
    save.mkdir()
    (save / "iter_0000004").symlink_to(whole.save / "iter_0000004")
    (save / TRACKER).write_text("4")
    result = Attempts(job, save, {**SHARDED, **quiet, **layout}, ranks=2).finished()
    assert [line["iteration"] for line in steps(result)] == [5, 6, 7, 8]
    for before, after in zip(steps(expected)[4:], steps(result), strict=True):
        for key in ("loss", "ce", "kd", "grad_norm"):
            assert after[key] == pytest.approx(before[key], rel=2e-5), key
    one, other = tensors(whole.save), tensors(save)
    for key in one.keys() & other.keys():
        size = min(len(one[key]), len(other[key])) if one[key].dim() else None  # padded vocabularies differ
        assert torch.allclose(one[key][:size], other[key][:size], rtol=1e-3, atol=2e-5), key


def test_the_default_format_of_the_optimizer_is_for_one_layout(job: SmallJob, tmp_path: Path) -> None:
    """A job reports it when it starts, and the other layout is refused before models are loaded."""
    flags = {"--use-distributed-optimizer": True, "--exit-interval": 2, "--save-interval": 2}
    first = Attempts(job, tmp_path / "save", flags, ranks=2).start()
    assert first.status == 0, first.errors[-3000:]
    assert "for other tensor-, pipeline- and expert-parallel sizes give --dist-ckpt-optim-fully" in first.output
    common = {**flags, "--save": tmp_path / "save", "--load": tmp_path / "save", "--train-iters": 8, "--eval-iters": 0}
    common |= {"--tensor-model-parallel-size": 2, "--lr-decay-iters": 8}
    result = run(job.flags({**common, "--kd-dry-run": True}), ranks=2)
    assert result.status == 1
    assert "--tensor-model-parallel-size 1 (here 2)" in result.errors, result.errors[-2000:]
