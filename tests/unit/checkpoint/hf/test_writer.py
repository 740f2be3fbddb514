"""Writing Hugging Face folders: split into files, complete or absent."""

import os
from pathlib import Path

import pytest
import torch

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.writer import StagedFolder, WeightsWriter, check_output, write_json
from mkd.errors import MkdCheckpointError
from tests.support.hf_folders import read_weights

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.ones(3, 7).t(),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}


def write(path, shard_bytes):
    plan = {name: (tuple(t.shape), t.dtype) for name, t in TENSORS.items()}
    writer = WeightsWriter(path, plan, shard_bytes)
    for name, tensor in TENSORS.items():
        writer.write(name, tensor)
    writer.close()
    write_json(path / "config.json", {})


@pytest.mark.parametrize(("shard_bytes", "files"), [(1000, 1), (90, 2), (40, 3), (24, 4), (1, 5)])
def test_written_files_match_the_safetensors_library(tmp_path, shard_bytes, files):
    write(tmp_path, shard_bytes)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) == files
    assert names[0] == ("model.safetensors" if files == 1 else f"model-00001-of-{files:05d}.safetensors")
    opened, weights = HFFolder(tmp_path, "--hf"), read_weights(tmp_path)
    for name, tensor in TENSORS.items():
        for seen in (weights[name], opened.read(name)):
            assert seen.dtype == tensor.dtype and torch.equal(seen, tensor), name


def test_folder_appears_when_complete(tmp_path):
    out = tmp_path / "out"
    with StagedFolder(out, "--hf") as staged:
        (staged.path / "x").write_text("1")
        assert not out.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "x"]


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), StagedFolder(tmp_path / "out", "--hf") as staged:
        (staged.path / "x").write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    if (process := os.fork()) == 0:
        killed = StagedFolder(tmp_path / "out", "--hf")
        killed.__enter__()
        (killed.path / "old").write_text("1")
        os._exit(0)
    os.waitpid(process, 0)
    assert (tmp_path / ".out.partial" / "old").exists()
    with StagedFolder(tmp_path / "out", "--hf"):
        pass
    assert list((tmp_path / "out").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_empty_folder_is_replaced(tmp_path):
    with StagedFolder(tmp_path, "--hf") as staged:
        (staged.path / "x").write_text("1")
    assert (tmp_path / "x").read_text() == "1"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_overwritten(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "x").write_text("1")
    else:
        out.write_text("1")
    with pytest.raises(MkdCheckpointError, match=f"--hf {out} exists"):
        StagedFolder(out, "--hf")


def test_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with StagedFolder(tmp_path / "link", "--hf") as staged:
        (staged.path / "file").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_text() == "x"


def test_mount_point_is_refused():
    with pytest.raises(MkdCheckpointError, match="--hf /proc is where a file system is mounted"):
        check_output(Path("/proc"), "--hf")
