"""Finding the iteration of a Megatron checkpoint folder; errors name the missing or damaged file."""

import json
import os
from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mkd.checkpoint.hf.folder import HFFolder, store_assets
from mkd.checkpoint.megatron.folder import TRACKER, MegatronFolder
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError
from mkd.job.resume.selection import check_pretrained
from tests.support.hf_folders import add_tokenizer, make_llama

FLAG = "--kd-teacher-load"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with iterations 2 and 30, made of placeholder files."""
    for iteration in (2, 30):
        path = tmp_path / f"iter_{iteration:07d}"
        path.mkdir()
        (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        (path / ".metadata").write_bytes(b"index")
        (path / "__0_0.distcp").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / TRACKER).write_text("30\n")
    return tmp_path


def assert_refused(path, *words):
    with pytest.raises(MkdCheckpointError) as caught:
        MegatronFolder(path, FLAG)
    for word in (FLAG, str(path), *words):
        assert word in str(caught.value), caught.value


def test_tracker_names_the_iteration(folder):
    assert MegatronFolder(folder, FLAG).iteration_dir == folder / "iter_0000030"


def test_release(folder):
    (folder / "iter_0000030").rename(folder / "release")
    (folder / TRACKER).write_text("release")
    assert MegatronFolder(folder, FLAG).iteration_dir == folder / "release"


def test_a_requested_step(folder):
    assert MegatronFolder(folder, FLAG, 2).iteration_dir == folder / "iter_0000002"
    with pytest.raises(MkdCheckpointError, match="--ckpt-step names 3, but there is no iter_0000003"):
        MegatronFolder(folder, FLAG, 3)
    (folder / TRACKER).write_text("release")
    with pytest.raises(MkdCheckpointError, match="leave --ckpt-step 2 out"):
        MegatronFolder(folder, FLAG, 2)


def test_initial_weights_are_checked_where_they_are_read(folder):
    """The placeholder files are damaged in both iterations; the error names the one that Megatron reads."""
    for step, name in ((2, "iter_0000002"), (None, "iter_0000030")):
        args = Namespace(pretrained_checkpoint=str(folder), ckpt_step=step, ckpt_format="torch_dist")
        with pytest.raises(MkdCheckpointError, match=name):
            check_pretrained(args, RunState())


def test_one_iteration(folder):
    assert MegatronFolder(folder / "iter_0000002", FLAG).iteration_dir == folder / "iter_0000002"


def test_missing_folder(tmp_path):
    assert_refused(tmp_path / "absent", "does not exist")


def test_no_tracker(folder):
    (folder / TRACKER).unlink()
    assert_refused(folder, TRACKER)


@pytest.mark.parametrize("text", ["", "3x", "-1", "releas", "²", "9" * 5000])
def test_damaged_tracker(folder, text):
    (folder / TRACKER).write_text(text)
    assert_refused(folder, TRACKER, repr(text.strip()[:40]))


def test_a_tracker_of_a_terabyte(folder):
    os.truncate(folder / TRACKER, 1 << 40)
    assert_refused(folder, TRACKER, "at most 1,048,576 are read")


def test_a_pipe_among_the_shards(folder):
    os.mkfifo(next(folder.glob("iter_*")) / "other.distcp")
    with pytest.raises(MkdCheckpointError, match=r"other\.distcp is not a regular file"):
        MegatronFolder(folder, "--load").fingerprint()


def test_tracker_names_a_missing_step(folder):
    (folder / TRACKER).write_text("31")
    assert_refused(folder, TRACKER, "iter_0000031")


@pytest.mark.parametrize("name", ["metadata.json", ".metadata"])
def test_incomplete_iteration(folder, name):
    (folder / "iter_0000030" / name).unlink()
    assert_refused(folder, "iter_0000030", name, "incomplete")


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_damaged_metadata(folder, text):
    (folder / "iter_0000030" / "metadata.json").write_text(text)
    assert_refused(folder, "iter_0000030/metadata.json", "damaged")


def test_other_format(folder):
    (folder / "iter_0000030" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert_refused(folder, "zarr", "--ckpt-format torch_dist")


def test_damaged_index(folder):
    for name in ("args", "metadata"):
        with pytest.raises(MkdCheckpointError, match=r"iter_0000030/\.metadata is damaged"):
            getattr(MegatronFolder(folder, FLAG), name)


def test_job_without_arguments(folder):
    dcp.save({"weight": torch.arange(6.0)}, checkpoint_id=folder / "iter_0000030", no_dist=True)
    opened = MegatronFolder(folder, FLAG)
    with pytest.raises(MkdCheckpointError, match="arguments in iter_0000030 cannot be read"):
        _ = opened.args
    weight = torch.zeros(6)
    opened.load({"weight": weight})
    assert torch.equal(weight, torch.arange(6.0))


def test_damaged_shard_names_the_tensor(folder):
    path = folder / "iter_0000030"
    dcp.save({"weight": torch.arange(6.0)}, checkpoint_id=path, no_dist=True)
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(MkdCheckpointError, match="weight cannot be read from iter_0000030"):
        MegatronFolder(folder, FLAG).load({"weight": torch.zeros(6)})


def test_fingerprint_depends_on_sampled_blocks(folder):
    first = MegatronFolder(folder, FLAG).fingerprint()
    assert first == MegatronFolder(folder / "iter_0000002", FLAG).fingerprint()
    shard = folder / "iter_0000030" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    second = MegatronFolder(folder, FLAG).fingerprint()
    shard.write_bytes(content[:-1])
    assert len({first, second, MegatronFolder(folder, FLAG).fingerprint()}) == 3


def test_tokenizer_beside_the_iterations(folder, tmp_path_factory):
    assert MegatronFolder(folder, FLAG).tokenizer_hash() is None
    model = make_llama(tmp_path_factory.mktemp("hf"))
    add_tokenizer(model, ["a", "b"])
    for _ in range(2):
        store_assets(HFFolder(model, "--hf"), folder)
    expected = HFFolder(model, "--hf").tokenizer_hash()
    for path in (folder, folder / "iter_0000002"):
        assert MegatronFolder(path, FLAG).tokenizer_hash() == expected
    names = sorted(path.name for path in (folder / "hf_assets").iterdir())
    assert names == ["config.json", "generation_config.json", "tokenizer.json"]
