"""Several ranks resolve one checkpoint, save together, and write a Hugging Face folder together."""

import os
from pathlib import Path

import pytest

from mkd.checkpoint.hf import writer as hf_writer
from mkd.checkpoint.hf.folder import HFFolder, store_assets
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.hf.snapshot import Snapshots
from mkd.checkpoint.megatron.folder import TRACKER
from mkd.checkpoint.megatron.integrity import INTEGRITY, changed_files
from mkd.checkpoint.megatron.resume_point import check_same_teacher_everywhere, resolve, select
from mkd.checkpoint.megatron.saving import Saving
from mkd.errors import MkdCheckpointError
from tests.support.hf_folders import add_tokenizer, make_llama
from tests.support.torch_dist_folders import SHARD, flip_a_byte, name_of, write_checkpoint


def resolved(rank: int, world_size: int, roots: list[Path]) -> str:
    point = select(roots[rank], own=True)
    try:
        return resolve(point, own=True, step=None, check_content=True).name
    except MkdCheckpointError as error:
        return str(error)


@pytest.mark.parametrize("file", [SHARD, ".metadata", "metadata.json"])
def test_all_ranks_use_the_previous_checkpoint(gloo_pool, tmp_path, file):
    """Independent of the rank that reads the damaged file."""
    for step in (2, 4):
        write_checkpoint(tmp_path / name_of(step), step)
    (tmp_path / TRACKER).write_text("4")
    assert gloo_pool(2).run(resolved, [tmp_path] * 2) == [name_of(4)] * 2
    damaged = tmp_path / name_of(4) / file
    if file == SHARD:
        flip_a_byte(damaged)
    else:
        damaged.write_bytes(damaged.read_bytes() + b" ")
    assert gloo_pool(2).run(resolved, [tmp_path] * 2) == [name_of(2)] * 2
    assert (tmp_path / TRACKER).read_text() == "2"
    assert [path.name for path in tmp_path.glob("torn_*")] == [f"torn_{name_of(4)}"]


def test_ranks_with_different_folders(gloo_pool, tmp_path):
    for rank in range(2):
        write_checkpoint(tmp_path / str(rank) / name_of(rank + 2), 1.0)
        (tmp_path / str(rank) / TRACKER).write_text(str(rank + 2))
    for text in gloo_pool(2).run(resolved, [tmp_path / "0", tmp_path / "1"]):
        assert "the ranks find different checkpoints there (iter_0000002, iter_0000003)" in text


def teacher_error(rank: int, world_size: int, fingerprints: list[str]) -> str | None:
    try:
        return check_same_teacher_everywhere(fingerprints[rank], "--kd-teacher-hf T")
    except MkdCheckpointError as error:
        return str(error)


def test_ranks_with_different_teachers(gloo_pool):
    assert gloo_pool(2).run(teacher_error, ["a", "a"]) == [None, None]
    for text in gloo_pool(2).run(teacher_error, ["a", "b"]):
        assert "--kd-teacher-hf T is a on rank 0 and b on rank 1" in text


def saved(rank: int, world_size: int, folder: Path, hashes: bool) -> None:
    """The calls of one save, with one shard per rank."""
    saving = Saving(folder.parent, hashes=hashes)
    if rank == 0:
        folder.mkdir(exist_ok=True)
    saving.before(folder)
    shard = folder / f"__{rank}_0.distcp"
    write = saving.writer(lambda rank, buckets, queue: shard.write_bytes(bytes(range(rank, 200))))
    write(rank, [(str(shard), shard.name, None)], None)
    if rank == 0:
        (folder / ".metadata").write_bytes(b"index")
        (folder / "metadata.json").write_text("{}")
    saving.written(folder)


def test_every_rank_hashes_its_shards(gloo_pool, tmp_path):
    folder = tmp_path / name_of(2)
    folder.mkdir()
    (folder / "__7_0.distcp").write_text("of an earlier attempt")
    gloo_pool(2).run(saved, folder, True)
    files = {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"}
    assert {path.name for path in folder.iterdir()} == {*files, INTEGRITY}
    assert changed_files(folder) == []
    for name in files:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"x")
        assert len(changed_files(folder)) == 1, name
        (folder / name).write_bytes(content)
    gloo_pool(2).run(saved, folder, False)
    assert {path.name for path in folder.iterdir()} == files


def interrupted(rank: int, world_size: int, folder: Path) -> None:
    Saving(folder.parent, hashes=True).before(folder)


def test_old_checkpoint_stays_until_the_new_one_is_complete(gloo_pool, tmp_path):
    """A finished job that is restarted saves its last iteration again, and may be killed during this save."""
    folder, kept = tmp_path / name_of(2), tmp_path / f"replaced_{name_of(2)}"
    gloo_pool(2).run(saved, folder, True)
    for _ in range(2):
        gloo_pool(2).run(interrupted, folder)
        assert not list(folder.iterdir())
        assert changed_files(kept) == []
        assert (kept / "metadata.json").exists()
        (folder / "__0_0.distcp").write_text("half")
    gloo_pool(2).run(saved, folder, True)
    assert os.listdir(tmp_path) == [folder.name]
    assert changed_files(folder) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(Hugging Face folder, folder of its checkpoint of iteration 4)"""
    root = tmp_path_factory.mktemp("model")
    hf = make_llama(root / "hf")
    add_tokenizer(hf, ["a", "b", "c"])
    import_hf(HFFolder(hf, "--hf"), root / "save")
    (root / "save" / "release").rename(root / "save" / name_of(4))
    store_assets(HFFolder(hf, "--hf"), root / "save")
    return hf, root / "save" / name_of(4)


def snapshot(rank: int, world_size: int, save: Path, checkpoint: Path, fails_on: int | None) -> str | None:
    """Export into files so small that every rank writes some."""
    original, write = hf_writer.PARALLEL_SHARD_BYTES, hf_writer.WeightsWriter.write

    def full(*args: object) -> None:
        raise OSError("disk full")

    hf_writer.PARALLEL_SHARD_BYTES = 1000
    if rank == fails_on:
        hf_writer.WeightsWriter.write = full
    try:
        snapshots = Snapshots(save, interval=2, keep=2)
        snapshots.clean()
        snapshots.take(checkpoint)
        return None
    except MkdCheckpointError as error:
        return str(error)
    finally:
        hf_writer.PARALLEL_SHARD_BYTES, hf_writer.WeightsWriter.write = original, write


def test_ranks_write_one_folder(gloo_pool, model, tmp_path):
    hf, checkpoint = model
    for step in (1, 2, 3, 10_000_000):
        (tmp_path / "hf" / name_of(step)).mkdir(parents=True)
    (tmp_path / "hf" / ".iter_0000003.partial").mkdir()
    (tmp_path / "hf" / "iter_of_mine").mkdir()
    assert gloo_pool(2).run(snapshot, tmp_path, checkpoint, None) == [None, None]
    # The later iteration is from before the job went back; it is not counted.
    assert sorted(os.listdir(tmp_path / "hf")) == ["iter_0000003", "iter_0000004", "iter_10000000", "iter_of_mine"]
    written = HFFolder(tmp_path / "hf" / name_of(4), "--hf")
    assert len(list(written.path.glob("*.safetensors"))) >= 2
    assert written.fingerprint() == HFFolder(hf, "--hf").fingerprint()
    assert written.tokenizer_hash() == HFFolder(hf, "--hf").tokenizer_hash()


@pytest.mark.parametrize("rank", [0, 1])
def test_write_failure_on_one_rank(gloo_pool, model, tmp_path, rank):
    """All ranks raise, and no folder has the name of a complete one."""
    for text in gloo_pool(2).run(snapshot, tmp_path, model[1], rank):
        folder = tmp_path / "hf" / name_of(4)
        assert f"--kd-save-hf-interval: rank {rank} cannot write {folder}: disk full" in text
    assert not list((tmp_path / "hf").glob("iter_*"))
    assert gloo_pool(2).run(snapshot, tmp_path, model[1], None) == [None, None]
    assert os.listdir(tmp_path / "hf") == [name_of(4)]


def test_no_snapshot_between_intervals(gloo_pool, model, tmp_path):
    checkpoint = tmp_path / name_of(3)
    checkpoint.symlink_to(model[1])
    assert gloo_pool(2).run(snapshot, tmp_path, checkpoint, None) == [None, None]
    assert not (tmp_path / "hf").exists()
