"""tools/check_invariance.py: equal and unequal trainings on one rank and in a layout."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mkd.cli import check_invariance as tool
from mkd.errors import MkdConfigError
from tests.support.e2e.small_job import SmallJob, make_small_job, run

LAYOUT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", "--save", "NOWHERE"]
Start = Callable[[list[str], int], tuple[int, str]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Runs the script; the run on one rank is the same in every test and is cached."""
    first = tmp_path_factory.mktemp("first") / "one_rank"

    def begin(flags: list[str], ranks: int) -> tuple[int, str]:
        save = Path(flags[flags.index("--save") + 1])
        if ranks == 1 and first.is_dir():
            shutil.copytree(first, save)
            return 0, ""
        done = run(flags, ranks)
        if ranks == 1 and done.status == 0:
            shutil.copytree(save, first)
        return done.status, done.output + done.errors

    return begin


def test_a_correct_layout(job: SmallJob, start: Start, capsys: pytest.CaptureFixture) -> None:
    status = tool.main(["--ranks", "2", "--steps", "2", "--", *job.flags(), *LAYOUT], start)
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert "step 2: grad_norm" in printed.out and "change of decoder." in printed.out
    assert "the same: " in printed.out.splitlines()[-1]


def test_a_layout_that_trains_differently(job: SmallJob, start: Start, capsys: pytest.CaptureFixture) -> None:
    """As with a wrong gradient, the losses of the first step agree and those of later steps do not."""

    def faulty(flags: list[str], ranks: int) -> tuple[int, str]:
        return start([*flags, "--clip-grad", "1e-4"] if ranks == 2 else flags, ranks)

    status = tool.main(["--ranks", "2", "--steps", "2", "--", *job.flags(), *LAYOUT], faulty)
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    differing = [line for line in lines if line.endswith("DIFFERS")]
    assert differing and not any(line.startswith("step 1:") for line in differing)
    assert any(line.startswith("change of") for line in differing)


def test_a_run_that_fails_is_an_error(job: SmallJob, capsys: pytest.CaptureFixture) -> None:
    status = tool.main(["--ranks", "2", "--", *job.flags()], lambda flags, ranks: (3, "what it said"))
    assert status == 1
    printed = capsys.readouterr().err
    assert printed.startswith("what it said\n") and "the run on 1 ranks ended with status 3; its output" in printed


def test_flags_of_each_run(job: SmallJob) -> None:
    flags = [*job.flags(), *LAYOUT, "--cp-comm-type", "p2p", "a2a", "--fp8-format=hybrid", "--lr", "3e-3"]
    common = tool.common_flags(flags, 4, keep_precision=False)
    for gone in ("--bf16", "--fp8-format=hybrid", "NOWHERE"):
        assert gone not in common
    assert common[common.index("--exit-interval") + 1] == "4" and common.count("--eval-iters") == 1
    one_rank = tool.without(common, tool.LAYOUT)
    assert set(common) - set(one_rank) == {"--tensor-model-parallel-size", "--sequence-parallel"} | {
        *("--cp-comm-type", "p2p", "a2a")
    }
    assert one_rank[one_rank.index("--lr", one_rank.index("--lr") + 1) + 1] == "3e-3"
    assert "--bf16" in tool.common_flags(flags, 4, keep_precision=True)


def test_flags_that_leave_nothing_to_compare(job: SmallJob) -> None:
    with pytest.raises(MkdConfigError, match="--steps is 3"):
        tool.common_flags(job.flags(), 3, keep_precision=False)
    with pytest.raises(MkdConfigError, match="random initial weights"):
        tool.common_flags(job.flags({"--kd-student-hf": None}), 4, keep_precision=False)
