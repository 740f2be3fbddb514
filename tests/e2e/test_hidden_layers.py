"""--kd-hidden-loss from the command line: training, resume, other layouts, starting points, export."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from tests.e2e.test_pretrain import PP2, SIX, TP2, cut_back, trained, weights
from tests.support.e2e.small_job import STUDENT, TEACHER, Result, SmallJob, make_small_job, run
from tests.support.hf_folders import read_weights

# The student's layer 2 is on the first of two stages, the teacher's 3 on the second; 3 and 1 the other way round.
PAIRS = {"--kd-hidden-loss": "2:3,3:1,4:4", "--kd-hidden-loss-weight": 0.7}
MAPS = ("kd_projections.2_3.weight", "kd_projections.3_1.weight", "kd_projections.4_4.weight")
EXACT = ("iteration", "loss", "ce", "kd", "hidden", "grad_norm")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def six_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Six undisturbed steps under PP2, saved at three and six."""
    save = tmp_path_factory.mktemp("six") / "save"
    return save, trained(job, {**SIX, **PP2, **PAIRS, "--save": save, "--load": save}, ranks=2)


def steps(result: Result) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT if key in line} for line in result.metrics if "grad_norm" in line]


def maps(save: Path) -> dict[str, torch.Tensor]:
    """The maps of the last checkpoint."""
    folder = MegatronFolder(save, "--load")
    stored = folder.metadata.state_dict_metadata
    kept = {key: torch.empty(stored[key].size) for key in stored if key.startswith("kd_projections.")}
    dcp.load(kept, checkpoint_id=folder.iteration_dir, no_dist=True)
    return kept


def test_the_term_is_part_of_the_loss_and_falls(six_steps: tuple[Path, Result]) -> None:
    result = six_steps[1]
    lines = steps(result)
    for line in lines:
        assert line["loss"] == pytest.approx(0.5 * (line["ce"] + line["kd"] + 0.7 * line["hidden"]), rel=1e-6)
    assert lines[-1]["hidden"] < 0.9 * lines[0]["hidden"]
    evaluations = [line for line in result.metrics if "valid_loss" in line]
    for line in evaluations:
        terms = line["valid_ce"] + line["valid_kd"] + 0.7 * line["valid_hidden"]
        assert line["valid_loss"] == pytest.approx(0.5 * terms, rel=1e-6)
    assert evaluations[-1]["valid_hidden"] < evaluations[0]["valid_hidden"]
    assert "R 0.7 mse of layers 2:3, 3:1, 4:4 (student:teacher), mapped from width 32 to 48" in result.output
    assert " | hidden " in result.output


def test_resume_is_bit_equal(job: SmallJob, six_steps: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = six_steps
    resumed = cut_back(save, tmp_path / "save", 3)
    before = maps(resumed)
    result = trained(job, {**SIX, **PP2, **PAIRS, "--save": resumed, "--load": resumed}, ranks=2)
    assert steps(result) == steps(whole)
    stored, again = maps(save) | weights(save), maps(resumed) | weights(resumed)
    assert set(MAPS) <= stored.keys() == again.keys()
    for key, value in stored.items():
        assert torch.equal(value, again[key]), key
    for key in MAPS:
        assert stored[key].shape == (TEACHER["hidden_size"], STUDENT["hidden_size"])
        assert not torch.equal(stored[key], before[key])


def test_saved_under_pp2_resumed_under_tp2(job: SmallJob, six_steps: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = six_steps
    resumed = cut_back(save, tmp_path / "save", 3)
    result = trained(job, {**SIX, **TP2, **PAIRS, "--save": resumed, "--load": resumed}, ranks=2)
    for seen, expected in zip(steps(result)[3:], steps(whole)[3:], strict=True):
        assert seen == pytest.approx(expected, rel=1e-5)


def test_resume_with_other_pairs_is_refused(job: SmallJob, six_steps: tuple[Path, Result]) -> None:
    save = six_steps[0]
    for changes, wanted in (({"--kd-hidden-loss": "2:3"}, "maps for 2:3"), ({}, "maps for none")):
        result = run(job.flags({**SIX, **changes, "--save": save, "--load": save}))
        assert result.status == 1
        for words in (f"--load {save} has", "2:3,3:1,4:4", wanted, "--kd-hidden-loss", "--pretrained-checkpoint"):
            assert words in result.errors


def test_export_leaves_the_maps_out(six_steps: tuple[Path, Result], tmp_path: Path) -> None:
    save = six_steps[0]
    export_hf(MegatronFolder(save, "--load"), tmp_path / "hf")
    exported = read_weights(tmp_path / "hf")
    assert not any("kd_" in name for name in exported)
    embedding = weights(save)["embedding.word_embeddings.weight"]
    assert torch.equal(exported["model.embed_tokens.weight"], embedding[: len(exported["model.embed_tokens.weight"])])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.num_hidden_layers == STUDENT["num_hidden_layers"]


@pytest.fixture(scope="module")
def three_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On one rank, from the student's folder."""
    return steps(trained(job, {**PAIRS, "--kd-metrics-file": tmp_path_factory.mktemp("three") / "m.jsonl"}))


def test_starts_from_a_checkpoint_without_maps(
    job: SmallJob, three_steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    import_hf(HFFolder(job.student, "--hf"), tmp_path / "start")
    start = {"--kd-student-hf": None, "--pretrained-checkpoint": tmp_path / "start", "--use-checkpoint-args": True}
    start |= {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": job.student}
    assert steps(trained(job, {**PAIRS, **start, "--kd-metrics-file": tmp_path / "m.jsonl"})) == three_steps


def test_bf16_stays_near_fp32(job: SmallJob, three_steps: list[dict[str, Any]], tmp_path: Path) -> None:
    bf16 = steps(trained(job, {**PAIRS, "--bf16": True, "--kd-metrics-file": tmp_path / "m.jsonl"}))
    for a, b in zip(bf16, three_steps, strict=True):
        assert a["hidden"] != b["hidden"]
        assert a["hidden"] == pytest.approx(b["hidden"], rel=1e-2)


def test_schedule_from_0_and_overlapped_communication(job: SmallJob, tmp_path: Path) -> None:
    """At R = 0 the teacher does not run; the maps must take part all the same, or their gradients are waited for."""
    runs = []
    changes = {"--kd-ratio": None, "--kd-ratio-schedule": "linear:0:1:2", "--use-distributed-optimizer": True}
    for number, flags in enumerate(({}, {"--overlap-grad-reduce": True, "--overlap-param-gather": True})):
        file = {"--kd-metrics-file": tmp_path / f"{number}.jsonl"}
        result = trained(job, {**PAIRS, **changes, **flags, **file, "--train-iters": 4, "--lr": 1e-2}, ranks=2)
        runs.append(steps(result))
        assert [line["valid_hidden"] > 0.0 for line in result.metrics if "valid_hidden" in line] == [True, True]
    assert runs[0] == runs[1]
    assert ["hidden" in line for line in runs[0]] == [False, True, True, True]
