"""Epochs of a run over its data, computed from an index alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mkd.data.epochs import MANY, readings_of_documents
from tests.support.e2e.small_job import write_data

HALF, REST = (0.0, 0.5), (0.5, 1.0)


def config(names: list[str], weights: list[float] | None, **changes: Any) -> SimpleNamespace:
    values = {"mock": False, "blend": (names, weights), "blend_per_split": None, "split_matrix": [HALF, REST, None]}
    return SimpleNamespace(sequence_length=8, **{**values, **changes})


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Files of 160 and 320 tokens."""
    return [str(write_data(tmp_path / name, [[1] * 16] * count)) for name, count in (("a", 10), ("b", 20))]


def test_one_file(names: list[str]) -> None:
    train, valid = readings_of_documents(config(names[:1], None), (25, 10 * MANY + 10, 7))
    assert (train.split, train.rows, train.per_epoch, train.epochs) == ("training", 25, 10, 2.5)
    assert train.warning is None
    assert (valid.split, valid.per_epoch) == ("validation", 10)
    assert "validation reads its part of" in valid.warning and "--eval-iters" in valid.warning


def test_blends(names: list[str]) -> None:
    wanted = [reading.rows for reading in readings_of_documents(config(names, [3.0, 1.0]), (100, 0, 0))]
    assert wanted == [75, 25]
    epochs = [reading.epochs for reading in readings_of_documents(config(names, None), (90, 0, 0))]
    assert epochs == [3.0, 3.0]  # in proportion
    own = [(names[:1], None), (names[1:], None), None]
    train, valid = readings_of_documents(config(names, None, blend_per_split=own), (20, 40, 5))
    assert (train.name, train.per_epoch, valid.name, valid.per_epoch) == (names[0], 20, names[1], 40)


def test_no_readings_without_lengths(names: list[str]) -> None:
    assert readings_of_documents(config([names[0], "x.jsonl"], None), (9, 9, 9)) == []
    assert readings_of_documents(config(names, None, mock=True, split_matrix=None), (9, 9, 9)) == []
