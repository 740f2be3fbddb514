"""pretrain_kd.py from the command line: resume, layouts of a checkpoint, teachers, schedules, plain pretraining."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from tests.support.e2e.small_job import ROOT, SCRIPT, Result, SmallJob, make_small_job, run, under_torchrun

PP2 = {"--pipeline-model-parallel-size": 2}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}
SIX = {"--train-iters": 6, "--lr-decay-iters": 6, "--save-interval": 3}
EXACT = ("iteration", "loss", "ce", "kd", "grad_norm", "lr", "tokens", "ratio")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def trained(job: SmallJob, changes: dict[str, Any], ranks: int = 1, **options: Any) -> Result:
    result = run(job.flags(changes), ranks, **options)
    assert result.status == 0, result.output[-2000:] + result.errors[-6000:]
    return result


def steps(result: Result) -> list[dict[str, Any]]:
    """Training lines of the metrics, what does not depend on the clock."""
    return [{key: line[key] for key in EXACT if key in line} for line in result.metrics if "grad_norm" in line]


def weights(save: Path) -> dict[str, torch.Tensor]:
    """Every model tensor of the last checkpoint, whole."""
    folder = MegatronFolder(save, "--load")
    kept = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in folder.metadata.state_dict_metadata.items()
        if key.startswith(("decoder.", "embedding.", "output_layer.")) and hasattr(value, "size")
    }
    assert kept
    dcp.load(kept, checkpoint_id=folder.iteration_dir, no_dist=True)
    return kept


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def cut_back(save: Path, copy: Path, iteration: int) -> Path:
    """A copy of a checkpoint folder as it was after `iteration`, for a job that died later."""
    shutil.copytree(save, copy)
    for folder in copy.glob("iter_*"):
        if int(folder.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(folder)
    (copy / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return copy


@pytest.fixture(scope="module")
def six_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Six undisturbed steps under PP2, saved at three and six."""
    save = tmp_path_factory.mktemp("six") / "save"
    return save, trained(job, {**SIX, **PP2, "--save": save, "--load": save}, ranks=2)


@pytest.fixture(scope="module")
def three_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of the unchanged job on one rank."""
    return steps(trained(job, {"--kd-metrics-file": tmp_path_factory.mktemp("three") / "m.jsonl"}))


def test_resume_is_bit_equal(job: SmallJob, six_steps: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = six_steps
    resumed = cut_back(save, tmp_path / "save", 3)
    result = trained(job, {**SIX, **PP2, "--save": resumed, "--load": resumed}, ranks=2)
    assert [line["iteration"] for line in steps(result)] == [1, 2, 3, 4, 5, 6]
    assert steps(result) == steps(whole)
    assert_same_weights(save, resumed)


@pytest.mark.parametrize("layout", [TP2, {**PP2, "--decoder-last-pipeline-num-layers": 1}], ids=["TP2", "PP2, 3 and 1"])
def test_saved_under_pp2_resumed_in_another_layout(
    job: SmallJob, six_steps: tuple[Path, Result], tmp_path: Path, layout: dict[str, Any]
) -> None:
    save, whole = six_steps
    resumed = cut_back(save, tmp_path / "save", 3)
    result = trained(job, {**SIX, **layout, "--save": resumed, "--load": resumed}, ranks=2)
    assert "--decoder-last-pipeline-num-layers 1 makes them" in whole.output and "makes them" not in result.output
    for seen, expected in zip(steps(result)[3:], steps(whole)[3:], strict=True):
        for key in ("loss", "ce", "kd", "grad_norm"):
            assert seen[key] == pytest.approx(expected[key], rel=1e-5), (seen["iteration"], key)


def test_the_same_division_of_the_layers_by_other_flags_resumes_to_the_last_bit(job: SmallJob, tmp_path: Path) -> None:
    """A distributed optimizer whose state is read in one layout only."""
    common = {**SIX, **PP2, "--use-distributed-optimizer": True}
    last = {**common, "--decoder-last-pipeline-num-layers": 1}
    whole = trained(job, {**last, "--save": tmp_path / "whole"}, ranks=2)
    resumed = cut_back(tmp_path / "whole", tmp_path / "resumed", 3)
    layout = {**common, "--pipeline-model-parallel-layout": "Ettt|tL", "--save": resumed, "--load": resumed}
    assert steps(trained(job, layout, ranks=2)) == steps(whole)
    assert_same_weights(tmp_path / "whole", resumed)


@pytest.mark.parametrize("by_itself", [False, True])
def test_what_a_run_prints(job: SmallJob, six_steps: tuple[Path, Result], tmp_path: Path, by_itself: bool) -> None:
    """mkd's own lines, those of iterations, evaluations and checkpoints, and not a thousand others of megatron's.

    Also with a Python of its own, where megatron is imported.
    """
    _, result = six_steps
    if by_itself:
        result = trained(job, {**SIX, "--save": tmp_path / "save"}, by_itself=True)
    lines = (result.output + result.errors).splitlines()
    assert len(lines) < 60
    counts = {"mkd: teacher ": 2, "mkd: loss ": 1, "mkd: start ": 1, "iteration ": 6, "validation at ": 2}
    for beginning, count in counts.items():
        assert sum(line.startswith(beginning) for line in lines) == count, beginning
    start = next(line for line in lines if line.startswith("mkd: start "))
    assert " s to the end of the first step: " in start
    assert "imports " in start or not by_itself  # forks have imported everything
    assert sum("successfully saved checkpoint" in line for line in lines) == 2
    for words in ("DEPRECATED", "deprecated", "one_logger", "end of arguments", "Theoretical"):
        assert words not in result.output + result.errors


@pytest.mark.slow
def test_torchrun_and_ranks_with_pythons_of_their_own(
    job: SmallJob, six_steps: tuple[Path, Result], tmp_path: Path
) -> None:
    """The losses of the forks, to the last bit."""
    flags = job.flags({**SIX, **PP2, "--save": tmp_path / "save"})
    command, env = under_torchrun(Path(sys.executable), [str(SCRIPT), *flags])
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "save/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == [line["loss"] for line in steps(six_steps[1])] and len(losses) == 6


def test_a_step_learns(six_steps: tuple[Path, Result]) -> None:
    lines = six_steps[1].metrics
    assert lines[0]["iteration"] == 0
    names = ("loss", "ce", "kd", "teacher_ce", "perplexity", "agreement")
    assert {f"valid_{name}" for name in names} <= lines[0].keys()
    trained_lines = steps(six_steps[1])
    assert trained_lines[-1]["kd"] < trained_lines[0]["kd"]
    for line in trained_lines:
        assert line["loss"] == pytest.approx(0.5 * line["ce"] + 0.5 * line["kd"], rel=1e-6)


def test_overlapped_distributed_optimizer_trains_the_same(job: SmallJob, tmp_path: Path) -> None:
    """With --overlap-param-gather the head's weights arrive during the forward pass; reading them early is silent."""
    runs = []
    for number, flags in enumerate(({}, {"--overlap-grad-reduce": True, "--overlap-param-gather": True})):
        changes = {"--use-distributed-optimizer": True, "--kd-metrics-file": tmp_path / f"{number}.jsonl", **flags}
        runs.append(steps(trained(job, {"--train-iters": 4, "--lr": 1e-2, **changes}, ranks=2)))
    assert runs[0] == runs[1]


def test_teacher_from_a_megatron_checkpoint(job: SmallJob, three_steps: list[dict[str, Any]], tmp_path: Path) -> None:
    import_hf(HFFolder(job.teacher, "--hf"), tmp_path / "teacher")
    file = {"--kd-metrics-file": tmp_path / "m.jsonl"}
    other = {"--kd-teacher-hf": None, "--kd-teacher-load": tmp_path / "teacher", **file}
    assert steps(trained(job, other)) == three_steps


def test_schedules_of_ratio_and_temperature(job: SmallJob, tmp_path: Path) -> None:
    """R goes from 0 to 1: each term is computed only where it counts, and evaluations see both all along."""
    changes = {
        "--kd-ratio": None,
        "--kd-ratio-schedule": "linear:0:1:2",
        "--kd-temperature-schedule": "linear:1:2:2",
        "--kd-metrics-file": tmp_path / "m",
        "--eval-interval": 1,
        "--lr": 0.0,
        "--min-lr": 0.0,
    }
    result = trained(job, changes)
    trained_lines = [line for line in result.metrics if "grad_norm" in line]
    evaluations = [line for line in result.metrics if "grad_norm" not in line]
    assert [(line["ratio"], line["temperature"]) for line in trained_lines] == [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)]
    assert [("ce" in line, "kd" in line) for line in trained_lines] == [(True, False), (True, True), (False, True)]
    # The weights do not move, so CE must not either, whatever R is; the divergence changes with T alone.
    for line in evaluations:
        assert line["valid_ce"] == pytest.approx(evaluations[0]["valid_ce"], rel=1e-6)
        assert line["valid_ce"] > 1.0
        assert line["valid_kd"] > 0.0
    assert evaluations[0]["valid_loss"] == pytest.approx(evaluations[0]["valid_ce"], rel=1e-6)
    assert evaluations[-1]["valid_loss"] == pytest.approx(evaluations[-1]["valid_kd"], rel=1e-6)


def test_bf16_stays_near_fp32(job: SmallJob, three_steps: list[dict[str, Any]], tmp_path: Path) -> None:
    bf16 = steps(trained(job, {"--bf16": True, "--kd-metrics-file": tmp_path / "bf16"}))
    for a, b in zip(bf16, three_steps, strict=True):
        assert a["loss"] != b["loss"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)


def test_ratio_0_is_plain_pretraining_to_the_last_bit(job: SmallJob, tmp_path: Path) -> None:
    import_hf(HFFolder(job.student, "--hf"), tmp_path / "start")
    start = {"--pretrained-checkpoint": tmp_path / "start", "--use-checkpoint-args": True, "--save-interval": 3}
    tokenizer = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": job.student}
    common = {**start, **tokenizer, "--kd-student-hf": None}
    trained(job, {**common, "--kd-ratio": 0.0, "--save": tmp_path / "kd"})
    # Megatron's --use-checkpoint-args leaves the norms' epsilon out; mkd takes it from the checkpoint.
    epsilon = {"--norm-epsilon": HFFolder(job.student, "--hf").config["rms_norm_eps"]}
    plain = {**common, **epsilon, "--kd-teacher-hf": None, "--kd-ratio": None, "--save": tmp_path / "plain"}
    trained(job, plain, script=ROOT / "tests/support/e2e/plain_pretrain.py")
    assert_same_weights(tmp_path / "kd", tmp_path / "plain")
    before, after = weights(tmp_path / "start"), weights(tmp_path / "kd")
    assert not torch.equal(before["embedding.word_embeddings.weight"], after["embedding.word_embeddings.weight"])
