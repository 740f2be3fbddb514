"""Folders with checkpoints, and checkpoints that are kept."""

from pathlib import Path

import pytest

from mkd.config.megatron.checks.checkpoints import check_initialization, check_save, check_saving, has_checkpoint
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError, MkdConfigError
from tests.unit.config.megatron.checks.test_written_texts import arguments, kd


def test_has_checkpoint(tmp_path: Path):
    assert not has_checkpoint(None)
    assert not has_checkpoint(str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert has_checkpoint(str(tmp_path))


def test_the_checkpoints_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    save, other = tmp_path / "save", tmp_path / "other"
    save.mkdir()
    check_save(arguments(save=str(save), load=None))
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    check_save(arguments(save=str(save), load=str(save)))
    check_save(arguments(save=None, load=str(save)))
    for load, start in ((None, "at iteration 0"), (str(other), f"from --load {other}")):
        with pytest.raises(MkdCheckpointError) as caught:
            check_save(arguments(save=str(save), load=load))
        assert str(caught.value) == (
            f"--save {save} has checkpoints already, and this job would begin {start} and replace them: give --load "
            f"{save} to resume their run, or another --save"
        )


def test_a_student_without_weights_is_initialized() -> None:
    empty = arguments(perform_initialization=False, pretrained_checkpoint=None)
    with pytest.raises(MkdConfigError, match="--no-initialization leaves the student without initial weights"):
        check_initialization(empty, kd(), RunState())
    check_initialization(empty, kd(student_hf="S"), RunState())
    check_initialization(empty, kd(), RunState(resume_from="L/iter_0000002"))
    check_initialization(arguments(perform_initialization=False, pretrained_checkpoint="P"), kd(), RunState())
    check_initialization(arguments(perform_initialization=True, pretrained_checkpoint=None), kd(), RunState())


def test_a_restart_does_not_begin_its_own_run_anew(tmp_path: Path) -> None:
    """With --finetune every start is at iteration 0."""
    save, other = str(tmp_path / "save"), str(tmp_path / "other")
    Path(save).mkdir()
    check_save(arguments(save=save, load=other, finetune=True))
    with pytest.raises(MkdConfigError, match=r"each start would begin at iteration 0.*; leave it out$"):
        check_save(arguments(save=save, load=save, finetune=True))
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(MkdConfigError, match="each start would begin at iteration 0") as caught:
        check_save(arguments(save=save, load=save, finetune=True))
    assert f"--pretrained-checkpoint {save}, and another folder" in str(caught.value)
    with pytest.raises(MkdCheckpointError, match=f"give --load {save}, without --finetune, to resume their run"):
        check_save(arguments(save=save, load=other, finetune=True))


def test_checkpoints_that_nobody_saves_or_reads() -> None:
    with pytest.raises(MkdConfigError, match="--kd-keep-last is 2, but there is no folder to save in"):
        check_saving(arguments(save=None), kd(keep_last=2))
    with pytest.raises(MkdConfigError, match="--kd-keep-last needs --ckpt-format torch_dist, not torch_dcp"):
        check_saving(arguments(save="S", ckpt_format="torch_dcp"), kd(keep_last=2))
    with pytest.raises(MkdConfigError, match="--kd-balance needs --ckpt-format torch_dist, not torch_dcp"):
        check_saving(arguments(save="S", ckpt_format="torch_dcp"), kd(balance=True))


def test_the_best_checkpoint_is_saved_and_evaluated() -> None:
    saved = dict(save="S", save_interval=20)
    check_saving(arguments(**saved), kd(keep_best="ce"))
    for changes, words in (
        ({"save": None}, "--kd-keep-best is ce, but there is no folder to save in: give --save"),
        ({"ckpt_format": "torch_dcp"}, "--kd-keep-best needs --ckpt-format torch_dist, not torch_dcp"),
        ({"eval_iters": 0}, "--kd-keep-best is ce, and --eval-iters is 0: nothing is evaluated"),
        ({"save_interval": 15}, "--save-interval 15 is not a multiple of --eval-interval 10"),
    ):
        with pytest.raises(MkdConfigError, match=words):
            check_saving(arguments(**{**saved, **changes}), kd(keep_best="ce"))
