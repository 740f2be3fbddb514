"""Errors about a folder of the other format name the flag or the command that takes it."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.config.megatron.checks.checkpoints import check_load
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError
from mkd.utils.model_folders.formats import CONFIG, TRACKER


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(MkdCheckpointError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--kd-teacher-hf", "give it in --kd-teacher-load"),
        ("--kd-student-hf", "give it in --pretrained-checkpoint"),
        ("--hf", "mkd convert export --load {path} --hf DIR makes a Hugging Face folder of it"),
    ],
)
def test_a_megatron_checkpoint_in_place_of_a_hugging_face_folder(tmp_path: Path, flag: str, remedy: str) -> None:
    (tmp_path / TRACKER).write_text("7")
    expected = f"; it is a Megatron checkpoint: {remedy.format(path=tmp_path)}"
    assert refusal(lambda: HFFolder(tmp_path, flag)).endswith(f"there is no {CONFIG}{expected}")


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--kd-teacher-load", "give it in --kd-teacher-hf"),
        ("--load", "mkd convert import --hf {path} --save DIR makes a Megatron checkpoint of it"),
    ],
)
def test_a_hugging_face_folder_in_place_of_a_megatron_checkpoint(tmp_path: Path, flag: str, remedy: str) -> None:
    (tmp_path / CONFIG).write_text("{}")
    expected = f"; it is a Hugging Face folder: {remedy.format(path=tmp_path)}"
    assert refusal(lambda: MegatronFolder(tmp_path, flag)).endswith(f"there is no {TRACKER}{expected}")


@pytest.mark.parametrize("name", ["load", "pretrained_checkpoint"])
def test_a_hugging_face_folder_as_the_student_s_checkpoint(tmp_path: Path, name: str) -> None:
    folders = {"load": None, "save": None, "pretrained_checkpoint": None, name: str(tmp_path)}
    message = refusal(lambda: check_load(Namespace(**folders), Namespace(student_hf=None), RunState()))
    assert ": correct the path" in message
    (tmp_path / CONFIG).write_text("{}")
    message = refusal(lambda: check_load(Namespace(**folders), Namespace(student_hf=None), RunState()))
    assert message.endswith("; it is a Hugging Face folder: give it in --kd-student-hf")
