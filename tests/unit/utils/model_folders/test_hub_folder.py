"""Folders of the hub's cache find their snapshot; names of repositories are refused with the command."""

import shutil
from pathlib import Path

import pytest

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.source import ModelSource
from mkd.checkpoint.tokenizer_hash import tokenizer_hash
from mkd.errors import MkdCheckpointError, MkdConfigError, MkdDataError
from mkd.utils.model_folders.hub_folder import download_hint, model_folder
from mkd.utils.model_folders.pretrained import load_tokenizer
from tests.support.hf_folders import add_tokenizer, make_llama

FLAG = "--kd-teacher-hf"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """As the hub lays it out: the files of a snapshot are links to blobs."""
    folder = tmp_path / "models--org--name"
    for commit in (OLD, NEW):
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    return folder


def test_the_snapshot_that_main_names(cache: Path) -> None:
    assert model_folder(cache, FLAG) == cache / "snapshots" / NEW
    (cache / "refs" / "main").write_text(f"{OLD}\n")
    assert model_folder(cache, FLAG) == cache / "snapshots" / OLD
    assert model_folder(cache / "snapshots" / OLD, FLAG) == cache / "snapshots" / OLD


def test_the_only_snapshot(cache: Path) -> None:
    shutil.rmtree(cache / "refs")
    with pytest.raises(MkdConfigError, match=r"has 2 snapshots \(aaa.*, bbb.*\) and refs/main names none"):
        model_folder(cache, FLAG)
    (cache / "snapshots" / OLD).rmdir()
    assert model_folder(cache, FLAG) == cache / "snapshots" / NEW
    (cache / "snapshots" / NEW).rmdir()
    with pytest.raises(MkdConfigError, match=r"has no snapshot; download it again \(hf download org/name\)"):
        model_folder(cache, FLAG)


def test_models_and_tokenizers_are_read_from_a_cache_folder(cache: Path, tmp_path: Path) -> None:
    blobs = make_llama(tmp_path / "blobs")
    add_tokenizer(blobs, ["a", "b"])
    for file in blobs.iterdir():
        (cache / "snapshots" / NEW / file.name).symlink_to(file)
    plain, found = ModelSource.from_hf(str(blobs), FLAG), ModelSource.from_hf(str(cache), FLAG)
    assert found.origin == f"{FLAG} {cache}" and found.path == found.tokenizer_folder == cache / "snapshots" / NEW
    assert (found.fingerprint(), found.tokenizer_hash) == (plain.fingerprint(), plain.tokenizer_hash)
    assert tokenizer_hash(cache, FLAG) == plain.tokenizer_hash is not None
    assert HFFolder(cache, FLAG).assets()
    assert len(load_tokenizer(str(cache))) == len(load_tokenizer(str(blobs)))


def test_other_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    assert model_folder(tmp_path, FLAG) == tmp_path
    assert model_folder("absent", FLAG) == Path("absent")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "https://huggingface.co/Qwen/Qwen3-0.6B"])
def test_a_repository_names_the_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in download_hint(name)
    with pytest.raises(
        MkdCheckpointError, match=rf"{FLAG} .*Qwen3-0.6B: the folder does not exist.*hf download Qwen/Q"
    ):
        ModelSource.from_hf(name, FLAG)
    with pytest.raises(MkdDataError, match=r"--tokenizer-model .*hf download Qwen/Qwen3-0.6B"):
        load_tokenizer(name)
    (tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots").mkdir(parents=True)
    assert f"give {tmp_path}/models--Qwen--Qwen3-0.6B" in download_hint(name)


@pytest.mark.parametrize("name", ["/models/teacher", "teacher", "a/b/c", "../teacher", "./a/b", ""])
def test_paths_are_no_repositories(name: str) -> None:
    assert download_hint(name) == ""


def test_a_reference_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "a").mkdir(parents=True)
    (tmp_path / "refs").mkdir()
    with open(tmp_path / "refs" / "main", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(MkdConfigError, match=r"refs/main .*at most 200 are read"):
        model_folder(tmp_path, FLAG)
