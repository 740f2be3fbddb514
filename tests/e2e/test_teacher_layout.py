"""pretrain_kd.py with a teacher in a layout of its own gives the metrics of a teacher in the student's layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from tests.support import hf_folders
from tests.support.e2e.small_job import TEACHER, VOCAB, SmallJob, make_model, make_small_job, make_tokenizer, run, text
from tests.support.tolerance import GRADIENT

TP2, PP2, EP2 = (
    {f"--kd-teacher-{kind}-parallel-size": 2} for kind in ("tensor-model", "pipeline-model", "expert-model")
)
KEYS = ("loss", "ce", "kd", "grad_norm", "valid_ce", "valid_kd", "valid_teacher_ce", "valid_agreement")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """A job with other teachers: in a Megatron checkpoint, with experts, with another tokenizer."""
    job = make_small_job(tmp_path_factory.mktemp("job"))
    import_hf(HFFolder(job.teacher, "--hf"), job.root / "megatron")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": VOCAB, "num_hidden_layers": 2}
    hf_folders.make_model(job.root / "experts", "mixtral", **sizes)
    make_model(job.root / "other", make_tokenizer(411, "many words in another order " * 9 + text()[::2]), 3, TEACHER)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(job.teacher / file, job.root / "experts")
    return job


def trained(job: SmallJob, file: Path, changes: dict[str, Any], ranks: int = 2) -> tuple[str, list[list[float]]]:
    """Output of a run, and those of `KEYS` that each line of its metrics has."""
    result = run(job.flags({"--kd-metrics-file": file, "--train-iters": 2, **changes}), ranks)
    assert result.status == 0, result.output[-2000:] + result.errors[-6000:]
    return result.output, [[line[key] for key in KEYS if key in line] for line in result.metrics]


@pytest.fixture(scope="module")
def shared_layout(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[float]]]:
    """Run with a teacher in the student's layout, DP 2."""
    return trained(job, tmp_path_factory.mktemp("shared") / "metrics", {})


def teacher_line(output: str) -> str:
    """The line about the teacher before the first step."""
    (line,) = (line for line in output.splitlines() if line.startswith("mkd: teacher ") and "perplexity" in line)
    return line


@pytest.mark.parametrize("source", ["hf", "megatron"])
def test_data_parallel_student_and_tensor_parallel_teacher(
    job: SmallJob, shared_layout: tuple[str, list[list[float]]], tmp_path: Path, source: str
) -> None:
    """The same weights from either kind of folder; Megatron's own loading reads its global groups."""
    changes = {"--kd-teacher-hf": None, "--kd-teacher-load": job.root / "megatron"} if source == "megatron" else {}
    output, seen = trained(job, tmp_path / "own", TP2 | changes)
    assert "mkd: layout     DP 2\n" in shared_layout[0] and "mkd: teacher's" not in shared_layout[0]
    assert "mkd: layout     DP 2\n" in output and "mkd: teacher's  layout DP 1, TP 2, SP\n" in output
    if source == "hf":
        assert teacher_line(output) == teacher_line(shared_layout[0])
    assert len(seen) == 4, "an evaluation, two steps, an evaluation"
    for line, (numbers, others) in enumerate(zip(seen, shared_layout[1], strict=True)):
        assert numbers == pytest.approx(others, rel=GRADIENT), f"line {line}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("teacher", "layout"),
    [
        pytest.param(
            {"--kd-teacher-hf": "{root}/experts", "--kd-allow-bad-teacher": True},
            EP2,
            id="experts / ep2",
        ),
        pytest.param(
            {
                "--kd-teacher-hf": "{root}/other",
                "--kd-xtoken-loss": "p_kl",
                "--kd-packing": "best_fit",
                "--kd-packing-multiple": 8,
            },
            TP2,
            id="other tokenizer, packed / tp2",
        ),
        pytest.param(
            {"--kd-teacher-hf": ["{root}/teacher", "{root}/student"], "--kd-teachers-mode": "averaged_logits"},
            PP2,
            id="averaged logits / pp2",
        ),
        pytest.param(
            {"--kd-teacher-hf": ["{root}/teacher", "{root}/student"], "--kd-teachers-mode": "select"},
            {**TP2, "--kd-teacher-offload": True},
            id="select, offloaded / tp2",
        ),
        pytest.param({"--kd-top-k": 7}, PP2, id="top-k / pp2"),
    ],
)
def test_other_teachers(job: SmallJob, tmp_path: Path, teacher: dict[str, Any], layout: dict[str, Any]) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("{root}", str(job.root)) if isinstance(value, str) else value

    teacher = {flag: filled(value) for flag, value in teacher.items()}
    _, expected = trained(job, tmp_path / "shared", teacher)
    _, seen = trained(job, tmp_path / "own", teacher | layout)
    for line, (numbers, others) in enumerate(zip(seen, expected, strict=True)):
        assert numbers == pytest.approx(others, rel=GRADIENT), f"line {line}"
