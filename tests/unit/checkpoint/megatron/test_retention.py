"""Old checkpoints are removed by --kd-keep-last, and nothing else is."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mkd.checkpoint.megatron.best import FILE, BestCheckpoint
from mkd.checkpoint.megatron.folder import TRACKER
from mkd.checkpoint.megatron.integrity import find_damage
from mkd.checkpoint.megatron.resume_point import select
from mkd.checkpoint.megatron.retention import Retention
from mkd.errors import MkdCheckpointError
from tests.support.torch_dist_folders import name_of, write_checkpoint


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Six checkpoints; the tracker names the fifth."""
    for step in (2, 4, 6, 8, 10, 12):
        write_checkpoint(tmp_path / name_of(step), float(step))
    (tmp_path / TRACKER).write_text("10")
    return tmp_path


def left(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("keep", "multiples_of", "steps"),
    [(1, None, [10, 12]), (2, None, [8, 10, 12]), (9, None, [2, 4, 6, 8, 10, 12]), (2, 4, [4, 6, 8, 10, 12])],
)
def test_the_newest_stay(save: Path, keep: int, multiples_of: int | None, steps: list[int]) -> None:
    """Iteration 12 is later than the one that was saved: of a job that went back, or a save that is not finished."""
    Retention(save, keep, multiples_of).remove_old(save / name_of(10))
    assert left(save) == [name_of(step) for step in steps]
    assert select(save, own=True).name == name_of(10)


def test_the_best_stays_and_is_not_counted(save: Path) -> None:
    best = BestCheckpoint(save, "accuracy")
    for step, value in ((2, 0.1), (4, 0.5), (6, 0.5), (8, 0.2), (10, math.nan)):
        best.evaluated(step, value)
        best.published(save / name_of(step))
    Retention(save, 1, best=best).remove_old(save / name_of(10))
    assert left(save) == [name_of(step) for step in (4, 10, 12)]
    assert json.loads((save / FILE).read_text()) == {"iteration": 4, "metric": "accuracy", "value": 0.5}
    assert BestCheckpoint(save, "accuracy").iteration == 4 and BestCheckpoint(save, "ce").iteration is None


def test_the_lowest_cross_entropy_is_the_best(save: Path) -> None:
    """A checkpoint that was not evaluated is not compared; one that is written again has its new value."""
    best = BestCheckpoint(save, "ce")
    for evaluated, published, value, expected in (
        (2, 2, 3.0, 2),
        (4, 6, 1.0, 2),
        (6, 6, 3.5, 2),
        (8, 8, 2.5, 8),
        (8, 8, 4.0, 8),
        (10, 10, 3.9, 10),
    ):
        best.evaluated(evaluated, value)
        best.published(save / name_of(published))
        assert best.iteration == expected
    shutil.rmtree(save / name_of(10))
    assert BestCheckpoint(save, "ce").iteration is None


def test_evaluations_before_an_asynchronous_save_is_published(save: Path) -> None:
    best = BestCheckpoint(save, "ce")
    for step, value in ((2, 3.0), (4, 2.0), (6, 4.0)):
        best.evaluated(step, value)
    best.published(save / name_of(4))
    assert best.iteration == 4
    best.published(save / name_of(6))
    assert best.iteration == 4


def test_the_last_checkpoint_is_evaluated_after_it_is_published(save: Path) -> None:
    """The value of the last evaluation is that of the last checkpoint; a second evaluation changes nothing."""
    best = BestCheckpoint(save, "ce")
    best.published(save / name_of(6))
    assert best.iteration is None
    best.evaluated(6, 2.0)
    best.evaluated(6, 2.5)
    assert best.iteration == 6 and json.loads((save / FILE).read_text())["value"] == 2.0


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"iteration": 2, "metric": "ce"}', '{"iteration": "2", "metric": "ce", "value": 1}'),
        f'{{"iteration": 2, "metric": "ce", "value": 1{"0" * 400}}}',
        f'{{"iteration": 1{"0" * 400}, "metric": "ce", "value": 1}}',
    ],
    ids=range(6),
)
def test_a_damaged_record_of_the_best(save: Path, text: str) -> None:
    (save / FILE).write_text(text)
    with pytest.raises(MkdCheckpointError, match=r"best_checkpoint.json is damaged \(.*\): remove it to compare"):
        BestCheckpoint(save, "ce")


def test_a_multiple_does_not_take_the_place_of_a_newest_one(save: Path) -> None:
    Retention(save, 2, 8).remove_old(save / name_of(10))
    assert left(save) == [name_of(step) for step in (6, 8, 10, 12)]


def test_other_folders_are_neither_counted_nor_removed(save: Path) -> None:
    (save / name_of(8) / "metadata.json").unlink()  # incomplete: it takes no complete one's place
    os.rename(save / name_of(2), save / "elsewhere")
    (save / name_of(2)).symlink_to(save / "elsewhere")
    others = ["hf", "release", "torn_iter_0000001", "replaced_iter_0000001", "iter_0000003.bak", "iter_3"]
    for name in others:
        shutil.copytree(save / name_of(6), save / name)
    (save / "hf" / name_of(2)).mkdir()
    Retention(save, 2).remove_old(save / name_of(10))
    assert left(save) == sorted([*others, "elsewhere", *(name_of(step) for step in (2, 6, 8, 10, 12))])
    assert (save / "hf" / name_of(2)).is_dir()


def test_a_checkpoint_elsewhere_removes_nothing(save: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_checkpoint(other / name_of(10), 1.0)
    for folder in (other / name_of(10), save / "release"):
        Retention(save, 1).remove_old(folder)
    assert len(left(save)) == 6


def test_an_interrupted_removal_leaves_no_checkpoint(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, removed = shutil.rmtree, []

    def half(path: Path, **options: object) -> None:
        if Path(path).exists():
            removed.append(path)
            (Path(path) / ".metadata").unlink()
            raise SystemExit("killed")

    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(SystemExit):
        Retention(save, 3).remove_old(save / name_of(10))
    assert len(removed) == 1
    monkeypatch.setattr(shutil, "rmtree", remove)
    complete = [name for name in left(save) if name.startswith("iter_")]
    assert complete == [name_of(step) for step in (4, 6, 8, 10, 12)]
    assert all(find_damage(save / name) is None for name in complete)
    Retention(save, 3).clean()
    assert left(save) == complete
    Retention(save, 3).remove_old(save / name_of(10))
    assert left(save) == [name_of(step) for step in (6, 8, 10, 12)]


def test_a_folder_that_cannot_be_removed_is_a_warning(
    save: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("mkd.checkpoint.megatron.retention.remove_folder", refuse)
    Retention(save, 4).remove_old(save / name_of(10))
    assert "iter_0000002 cannot be removed (read-only)" in capsys.readouterr().out
