"""An absent path is answered with an existing one of a similar name."""

import os
from pathlib import Path

import pytest

from mkd.checkpoint.source import ModelSource
from mkd.data.checks import check_data
from mkd.errors import MkdCheckpointError, MkdDataError
from mkd.utils.model_folders.pretrained import load_tokenizer
from mkd.utils.near_paths import near_path, near_path_hint


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "w" / "teacher").mkdir(parents=True)
    (tmp_path / "w" / "chats.idx").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_name_is_misspelled(work: Path) -> None:
    assert near_path("w/teechr") == Path("w/teacher")
    assert near_path(work / "w" / "teechr") == work / "w" / "teacher"
    (work / "models" / "teacher").mkdir(parents=True)
    assert near_path("model/teacher") == Path("models/teacher")
    assert near_path("model/student") is None and near_path("w/student") is None
    assert near_path("w/teechr", Path.is_file) is None
    assert near_path_hint("w/teechr") == "; did you mean w/teacher?" and near_path_hint("w/x") == ""


def test_paths_that_cannot_be_listed(work: Path) -> None:
    for path in ("", "/", "w/\0", "x" * 5000, "w/chats.idx/a"):
        assert near_path(path) is None
    assert os.getcwd() == str(work)


def test_a_folder_of_a_similar_name_comes_before_the_hub(work: Path) -> None:
    with pytest.raises(MkdCheckpointError, match=r"w/teechr: the folder does not exist; did you mean w/teacher\?$"):
        ModelSource.from_hf("w/teechr", "--kd-teacher-hf")
    with pytest.raises(MkdDataError, match=r"w/teechr does not exist or is not a folder; did you mean w/teacher\?$"):
        load_tokenizer("w/teechr")
    with pytest.raises(MkdDataError, match=r"w/chat.idx does not exist .*; did you mean w/chats\?$"):
        check_data(["w/chat"], 10, None)
