"""pretrain_kd.py with context parallelism, packed rows and microbatches of differing length: the losses and gradient
norms of one rank, in training and in evaluation.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.small_job import END, SmallJob, make_small_job, run, text

CP2 = {"--context-parallel-size": 2}
PP2 = {"--pipeline-model-parallel-size": 2}
PACKED = {"--kd-packing": "best_fit", "--kd-packing-multiple": 8}
KEYS = ("loss", "ce", "kd", "grad_norm", "valid_ce", "valid_kd", "valid_teacher_ce")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """With a chat file of conversations of many lengths, and a template in the tokenizers."""
    job = make_small_job(tmp_path_factory.mktemp("job"))
    assert END in TEMPLATE
    for folder in (job.teacher, job.student):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    words = text().split()
    turns = [("user", words[i : i + 3]) if i % 2 else ("assistant", words[i : i + i % 9 + 1]) for i in range(400)]
    messages = [{"role": role, "content": " ".join(said)} for role, said in turns]
    pairs = [{"messages": [messages[i], messages[i + 1]]} for i in range(1, 399, 2)]
    (job.root / "chat.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return job


def numbers(job: SmallJob, file: Path, changes: dict[str, Any], ranks: int = 1) -> list[list[float]]:
    """`KEYS` of every line of the metrics, as far as it has them."""
    result = run(job.flags({"--kd-metrics-file": file, **changes}), ranks)
    assert result.status == 0, result.output[-2000:] + result.errors[-6000:]
    return [[line[key] for key in KEYS if key in line] for line in result.metrics]


@pytest.mark.parametrize(
    ("data", "layout", "ranks"),
    [
        pytest.param({}, CP2, 2, id="cp2"),
        pytest.param(PACKED, {**CP2, **PP2}, 4, id="packed-cp2-pp2"),
        pytest.param({"--data-path": "chat.jsonl"}, {**PP2, "--kd-variable-seq-lengths": True}, 2, id="variable-pp2"),
    ],
)
def test_equals_one_rank(
    job: SmallJob, tmp_path: Path, data: dict[str, Any], layout: dict[str, Any], ranks: int
) -> None:
    if "--data-path" in data:
        data = {"--data-path": job.root / data["--data-path"], "--seq-length": 64}
    one = numbers(job, tmp_path / "one", data)
    several = numbers(job, tmp_path / "several", {**data, **layout}, ranks)
    assert len(one) == 5, "an evaluation, three steps, an evaluation"
    for line, (seen, expected) in enumerate(zip(several, one, strict=True)):
        assert seen == pytest.approx(expected, rel=1e-5), f"line {line}"
