"""--kd-epochs: iterations from rows."""

from argparse import Namespace
from typing import Any

import pytest

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.epochs import UNKNOWN_ITERATIONS, adopt_epochs, iterations_are_unknown
from mkd.errors import MkdConfigError
from mkd.job import epochs
from mkd.job.epochs import iterations_of, set_iterations


@pytest.mark.parametrize(
    ("number", "rows", "batch", "iterations"),
    [(1, 64, 8, 8), (1, 65, 8, 9), (3, 10, 4, 8), (0.5, 64, 8, 4), (0.1, 30, 3, 1), (0.001, 8, 8, 1), (1.1, 10, 11, 1)],
)
def test_every_row_is_read(number: float, rows: int, batch: int, iterations: int) -> None:
    assert iterations_of(number, rows, batch) == iterations


def arguments(**changes: Any) -> Namespace:
    given = dict(train_iters=None, train_samples=None, mock_data=False, step_batch_size_schedule=None)
    return Namespace(**{**given, "global_batch_size": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_iters": 5}, "--train-iters 5 and --kd-epochs 2 both set the length of the run: give one"),
        ({"train_samples": 5}, "--train-samples 5 and --kd-epochs 2 both set the length of the run"),
        ({"mock_data": True}, "--kd-epochs is 2, but --mock-data has no end"),
        ({"step_batch_size_schedule": "0:4"}, "does not work with --step-batch-size-schedule 0:4"),
        ({"global_batch_size": None}, "--kd-epochs 2 needs --global-batch-size"),
    ],
)
def test_refused(changes: dict, words: str) -> None:
    args = arguments(**changes)
    with pytest.raises(MkdConfigError) as caught:
        adopt_epochs(args, 2.0)
    assert words in str(caught.value)
    assert args.train_iters or args.train_samples, "the length counts as missing"


def test_without_the_flag_nothing_changes() -> None:
    args = arguments(train_iters=5)
    adopt_epochs(args, None)
    set_iterations(args, KDConfig(teacher_hf=["T"], ratio=0.5), None, None)
    assert args.train_iters == 5


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_numbers(number: float) -> None:
    with pytest.raises(MkdConfigError, match=r"--kd-epochs is .*; it must be a finite number > 0"):
        KDConfig(teacher_hf=["T"], ratio=0.5, epochs=number)


def test_iterations_are_set_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule is checked when its length is known."""
    args, checked = arguments(), []
    adopt_epochs(args, 1.5)
    assert args.train_iters == UNKNOWN_ITERATIONS and iterations_are_unknown(args)
    monkeypatch.setattr(epochs, "check_learning_rate", lambda args: checked.append(args.train_iters))
    monkeypatch.setattr(epochs, "check_stored_schedule", lambda args, point: [f"from {point}"])
    data = Namespace(rows_per_epoch=lambda: 101, has_own_rows=True)
    set_iterations(args, KDConfig(teacher_hf=["T"], ratio=0.5, epochs=1.5), data, "a point")
    assert args.train_iters == 19 and checked == [19]
    out = capsys.readouterr().out
    assert "1.5 of 101 rows are 19 iterations of 8 rows" in out and "from a point" in out
    set_iterations(args, KDConfig(teacher_hf=["T"], ratio=0.5, epochs=1.5), None, None)  # once
