"""--kd-config and run.yaml: a run repeated from its own file has the same losses to the last bit."""

from pathlib import Path

import pytest

from mkd.config.command_words import words_of
from mkd.config.run_file import read_file
from tests.support.e2e.small_job import ROOT, SmallJob, make_small_job, run

COMMAND = ROOT / "mkd" / "__main__.py"
SAME = ("loss", "ce", "kd", "grad_norm", "lr", "tokens")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def values(metrics: list[dict]) -> list[dict]:
    return [{name: line[name] for name in SAME} for line in metrics if "grad_norm" in line]


def test_a_run_is_repeated_from_its_own_file(job: SmallJob, tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("optimizer:\n  lr: 5e-3\n  weight_decay: 0.1\nkd-temperature: 2\nlog-interval: 1\n")
    save = tmp_path / "first"
    own = job.flags({"--save": save, "--load": save, "--save-interval": 3, "--lr": 1e-3, "--kd-config": file})
    first = run(own)
    assert first.status == 0, first.errors
    words = words_of(read_file(str(save / "run.yaml")))
    assert words[words.index("--lr") + 1] == "0.001"  # that of the command line
    assert words[words.index("--kd-temperature") + 1] == "2"
    assert "--kd-config" not in words

    again = tmp_path / "again"
    repeat = ["train", "--kd-config", str(save / "run.yaml"), "--save", str(again), "--load", str(again)]
    second = run(repeat, script=COMMAND)
    assert second.status == 0, second.errors
    assert len(values(first.metrics)) == 3
    assert values(second.metrics) == values(first.metrics)

    records = ("run.yaml", "kd_config.json")
    trained = [(again / name).read_bytes() for name in records]
    third = run([*repeat, "--kd-log-level", "debug"], script=COMMAND)  # no step is left
    assert third.status == 0, third.errors
    assert [(again / name).read_bytes() for name in records] == trained
    assert words_of(read_file(str(again / "run-1.yaml")))[-1] == "debug"


def test_an_error_in_a_file_ends_the_job_with_one_line(job: SmallJob, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kd-temprature: 2\n")
    done = run(["train", *job.flags({"--kd-config": file})], script=COMMAND)
    assert done.status == 1
    assert done.errors.splitlines()[-1] == (
        f"mkd train: error: --kd-config {file}, line 1: no flag is named kd-temprature (did you mean kd-temperature?)"
    )
