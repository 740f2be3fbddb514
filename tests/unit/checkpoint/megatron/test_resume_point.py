"""Selection and repair of checkpoints: incomplete, corrupt and foreign folders, one kind of damage at a time."""

import itertools
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import save_integrity_manifest, verify_integrity_manifest

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.checkpoint.megatron.integrity import INTEGRITY, changed_files, find_damage
from mkd.checkpoint.megatron.resume_point import changed_settings, check_same_job, check_teacher, resolve, select
from mkd.checkpoint.megatron.saving import OWNER, Saving
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.job.resume.selection import select_checkpoint
from mkd.utils.atomic_files import replacing
from tests.support.torch_dist_folders import SHARD, flip_a_byte, name_of, truncate, write_checkpoint

STEPS = (2, 4, 6)


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Three checkpoints; the tracker names the last."""
    for step in STEPS:
        write_checkpoint(tmp_path / name_of(step), float(step))
    (tmp_path / TRACKER).write_text("6")
    return tmp_path


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file with its content, and every folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def resolved(save: Path, own: bool = True, check_content: bool = True, step: int | None = None) -> str | None:
    point = select(save, own=own, step=step)
    return resolve(point, own=own, step=step, check_content=check_content).name


def change_index(folder: Path) -> None:
    """A size in the index is another one; it is still an index."""
    content = (folder / ".metadata").read_bytes()
    changed = content.replace(b"K@K ", b"K K@")  # the shape [64, 32]
    assert changed != content
    (folder / ".metadata").write_bytes(changed)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted shard": (lambda folder: (folder / SHARD).unlink(), f"shard {SHARD} is missing"),
    "truncated shard": (lambda folder: truncate(folder / SHARD), f"shard {SHARD} has "),
    "deleted index": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "truncated index": (lambda folder: truncate(folder / ".metadata"), ".metadata is damaged"),
    "empty index": (lambda folder: (folder / ".metadata").write_bytes(b""), ".metadata is damaged"),
    "changed index": (change_index, ".metadata is not what was written (its SHA-256 differs)"),
    "deleted metadata": (lambda folder: (folder / "metadata.json").unlink(), "metadata.json is missing"),
    "empty metadata": (lambda folder: (folder / "metadata.json").write_bytes(b""), "metadata.json is damaged"),
    "metadata is not an object": (
        lambda folder: (folder / "metadata.json").write_text("[]"),
        "metadata.json is damaged",
    ),
}
CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped byte in a shard": (lambda folder: flip_a_byte(folder / SHARD), f"{SHARD} is not what was written"),
    "empty manifest": (lambda folder: (folder / INTEGRITY).write_text(""), f"{INTEGRITY} is damaged"),
    "other metadata": (
        lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}'),
        "metadata.json is not what was written",
    ),
}


def test_complete_folders_have_no_damage(save: Path) -> None:
    for step in STEPS:
        assert find_damage(save / name_of(step)) is None
        assert changed_files(save / name_of(step)) == []


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named(save: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    damage(save / name_of(6))
    assert words in find_damage(save / name_of(6))


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_content_is_found_by_one_rank(save: Path, kind: str) -> None:
    change, words = CHANGES[kind]
    change(save / name_of(6))
    assert find_damage(save / name_of(6)) is None
    for ranks in (1, 2, 3):
        found = [text for rank in range(ranks) for text in changed_files(save / name_of(6), rank, ranks)]
        assert found
        assert all(words in text for text in found)


def test_manifest_has_megatrons_format(save: Path) -> None:
    """mkd's manifest passes Megatron-LM's --verify-integrity, and mkd reads Megatron-LM's manifest."""
    folder = save / name_of(6)
    verify_integrity_manifest(str(folder))
    ours = json.loads((folder / INTEGRITY).read_text())
    save_integrity_manifest(str(folder))
    assert json.loads((folder / INTEGRITY).read_text()) == ours
    flip_a_byte(folder / SHARD)
    with pytest.raises(CheckpointingException):
        verify_integrity_manifest(str(folder))
    assert changed_files(folder)


def test_complete_folder_is_not_changed(save: Path, one_rank: None) -> None:
    before = listing(save)
    assert resolved(save) == name_of(6)
    assert listing(save) == before


@pytest.mark.parametrize("kind", [*DAMAGES, *CHANGES])
def test_previous_checkpoint_is_used(save: Path, one_rank: None, kind: str, capsys) -> None:
    damage, words = {**DAMAGES, **CHANGES}[kind]
    damage(save / name_of(6))
    assert resolved(save) == name_of(4)
    assert (save / TRACKER).read_text() == "4"
    assert not (save / name_of(6)).exists()
    assert (save / f"torn_{name_of(6)}").is_dir()
    printed = capsys.readouterr().out
    assert words in printed
    assert f"renamed to torn_{name_of(6)}" in printed
    assert "continuing from iter_0000004" in printed
    assert resolved(save) == name_of(4)


def test_two_incomplete_checkpoints(save: Path, one_rank: None) -> None:
    (save / f"torn_{name_of(6)}").mkdir()  # the name is taken
    flip_a_byte(save / name_of(6) / SHARD)
    truncate(save / name_of(4) / SHARD)
    assert resolved(save) == name_of(2)
    names = {path.name for path in save.glob("torn_*")}
    assert names == {f"torn_{name_of(4)}", f"torn_{name_of(6)}", f"torn_{name_of(6)}.1"}


@pytest.mark.parametrize("text", ["", "six", "-6", "6.0", "\x00\x00", "8", "5"])
def test_invalid_tracker(save: Path, one_rank: None, text: str) -> None:
    (save / TRACKER).write_text(text)
    assert resolved(save) == name_of(6)
    assert (save / TRACKER).read_text() == "6"


def test_deleted_tracker(save: Path, one_rank: None) -> None:
    (save / TRACKER).unlink()
    assert resolved(save) == name_of(6)
    assert (save / TRACKER).read_text() == "6"


def test_save_killed_before_the_tracker(save: Path, one_rank: None, capsys) -> None:
    """The tracker is replaced last: a folder that it does not name is not a completed save."""
    (save / TRACKER).write_text("4")
    assert resolved(save) == name_of(4)
    assert "iter_0000006 in" in capsys.readouterr().out
    (save / name_of(6) / "metadata.json").unlink()
    assert resolved(save) == name_of(4)
    assert (save / f"torn_{name_of(6)}").is_dir()


def test_first_save_killed(tmp_path: Path, one_rank: None) -> None:
    write_checkpoint(tmp_path / name_of(2), 2.0)
    (tmp_path / name_of(2) / "metadata.json").unlink()
    assert resolved(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [f"torn_{name_of(2)}"]


def test_copies_under_other_names_are_ignored(save: Path, one_rank: None) -> None:
    for name in ("iter_0000006.bak", "iter_0000006_old", "iter_6"):
        write_checkpoint(save / name, 6.0)
    (save / name_of(6) / SHARD).unlink()
    (save / name_of(4) / SHARD).unlink()
    (save / name_of(2) / SHARD).unlink()
    (save / TRACKER).write_text("6")
    with pytest.raises(MkdCheckpointError, match="no complete checkpoint"):
        resolved(save)


def test_missing_folder_gives_an_empty_resume_point(tmp_path: Path) -> None:
    """Ranks on a node without the folder must still take part in the collective check."""
    where = str(tmp_path / "gone")
    args = Namespace(ckpt_format="torch_dist", load=where, save=where, ckpt_step=None)
    state = RunState(resume_from="another")
    point = select_checkpoint(args, state)
    assert (point.name, state.resume_from) == (None, None)


def test_empty_folder(tmp_path: Path, one_rank: None) -> None:
    assert resolved(tmp_path) is None


def test_no_complete_checkpoint_is_an_error(save: Path, one_rank: None) -> None:
    """The job must not restart from iteration 0 if there was a checkpoint."""
    for step in STEPS:
        flip_a_byte(save / name_of(step) / SHARD)
    before = listing(save)
    with pytest.raises(MkdCheckpointError) as caught:
        resolved(save)
    for words in ("--load", str(save), "no complete checkpoint", *map(name_of, STEPS), "SHA-256"):
        assert words in str(caught.value)
    assert listing(save) == before


def test_content_is_not_checked_without_hashes(save: Path, one_rank: None) -> None:
    flip_a_byte(save / name_of(6) / SHARD)
    assert resolved(save, check_content=False) == name_of(6)
    (save / name_of(6) / INTEGRITY).unlink()
    assert resolved(save) == name_of(6)


@pytest.mark.parametrize("kind", [*DAMAGES, *CHANGES])
def test_folder_of_another_job_is_not_changed(save: Path, one_rank: None, kind: str) -> None:
    {**DAMAGES, **CHANGES}[kind][0](save / name_of(6))
    before = listing(save)
    with pytest.raises(MkdCheckpointError, match="give --ckpt-step 4 to continue from it") as caught:
        resolved(save, own=False)
    assert {**DAMAGES, **CHANGES}[kind][1] in str(caught.value)
    assert listing(save) == before
    assert resolved(save, own=False, step=4) == name_of(4)


def test_ckpt_step(save: Path, one_rank: None) -> None:
    before = listing(save)
    assert resolved(save, step=2) == name_of(2)
    assert listing(save) == before
    with pytest.raises(MkdCheckpointError, match="--ckpt-step 3: there is no iter_0000003"):
        resolved(save, step=3)
    truncate(save / name_of(2) / SHARD)
    with pytest.raises(MkdCheckpointError, match="iter_0000002 is not complete: shard"):
        resolved(save, step=2)


def test_release(save: Path, one_rank: None) -> None:
    write_checkpoint(save / "release", 0.0)
    (save / TRACKER).write_text("release")
    assert resolved(save) == "release"
    assert (save / TRACKER).read_text() == "release"


@pytest.mark.parametrize("kind", ["torch", "zarr"])
def test_other_formats_are_refused_and_not_set_aside(save: Path, kind: str) -> None:
    folder = save / name_of(6)
    if kind == "zarr":
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    else:
        (folder / "metadata.json").unlink()
        (folder / "mp_rank_00").mkdir()
    with pytest.raises(MkdCheckpointError, match=f"format {kind}.*--ckpt-format torch_dist"):
        select(save, own=True)


def test_index_that_names_a_file_elsewhere(save: Path) -> None:
    folder = save / name_of(6)
    content = (folder / ".metadata").read_bytes()
    evil = b"../4/0.distcp"[: len(SHARD)].ljust(len(SHARD), b"x")
    assert content.count(SHARD.encode()) >= 1
    (folder / ".metadata").write_bytes(content.replace(SHARD.encode(), evil))
    assert "which is not in the folder" in find_damage(folder)


def model(**changes: object) -> Namespace:
    sizes = {"num_layers": 4, "hidden_size": 32, "vocab_size": 307, "rotary_base": 10000, "finetune": False}
    return Namespace(**{**sizes, **changes})


@pytest.mark.parametrize(("name", "value"), [("num_layers", 6), ("hidden_size", 64), ("vocab_size", 311)])
def test_another_architecture(name: str, value: int) -> None:
    check_same_job(model(), model(), "--load X")
    flag = f"--{name.replace('_', '-')}"
    for finetune in (False, True):
        with pytest.raises(MkdCheckpointError, match=f"--load X is a checkpoint of another model: {flag} is {value}"):
            check_same_job(model(finetune=finetune), model(**{name: value}), "--load X")


def test_another_window_is_another_model() -> None:
    with pytest.raises(MkdCheckpointError, match=r"--window-size is \(127, 0\) there and None"):
        check_same_job(model(window_size=None), model(window_size=(127, 0)), "--load X")


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("squared_relu", False, True),
        ("no_rope_freq", None, 2),
        ("rotary_seq_len_interpolation_factor", None, 2),
        ("rotary_scaling_factor", 1.0, 4.0),
        ("yarn_beta_fast", None, 16.0),
        ("mup_output_mult", 1.0, 0.5),
        ("qk_l2_norm", False, True),
        ("moe_router_topk_scaling_factor", None, 2.5),
        ("moe_router_num_groups", None, 2),
        ("moe_router_enable_expert_bias", False, True),
        ("moe_layer_freq", 1, 2),
    ],
)
def test_flags_that_change_the_computation_of_a_random_student(name: str, before: object, now: object) -> None:
    with pytest.raises(MkdCheckpointError, match=f"--{name.replace('_', '-')} is {before} there and {now} in this job"):
        check_same_job(model(**{name: now}), model(**{name: before}), "--load X")


def test_a_flag_of_yarn_with_megatrons_value_is_no_change() -> None:
    check_same_job(model(yarn_beta_fast=32.0), model(yarn_beta_fast=None), "--load X")


def test_size_flags_continue_the_run_of_a_folder() -> None:
    """--kd-student-hf stores properties without a flag, which a script of Megatron does not have."""
    off = {"whole_width_qk_norms": False, "gelu_tanh": False, "embedding_scale_in_params_dtype": False}
    check_same_job(model(), model(**off), "--load X")
    check_same_job(model(whole_width_qk_norms=None), model(**off), "--load X")
    for name in off:
        with pytest.raises(MkdCheckpointError, match="is True there and None in this job"):
            check_same_job(model(), model(**{**off, name: True}), "--load X")


def test_another_meaning_of_the_same_shapes() -> None:
    with pytest.raises(MkdCheckpointError, match="--rotary-base is 500000 there and 10000 in this job"):
        check_same_job(model(), model(rotary_base=500000), "--load X")
    check_same_job(model(finetune=True), model(rotary_base=500000), "--load X")
    check_same_job(model(), model(vocab_size=None), "--load X")


def test_one_key_value_head_per_head_in_every_spelling() -> None:
    heads = {"num_attention_heads": 4, "group_query_attention": False}
    for there, here in itertools.product((None, 1, 4), repeat=2):
        check_same_job(model(**heads, num_query_groups=here), model(**heads, num_query_groups=there), "--load X")
    grouped = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
    with pytest.raises(MkdCheckpointError, match="--num-query-groups is 2 there and 1 in this job"):
        check_same_job(model(**heads, num_query_groups=1), model(**grouped), "--load X")


def test_another_teacher() -> None:
    stored = Namespace(kd_teacher_fingerprint="aa")
    assert check_teacher("aa", stored, "--kd-teacher-hf T", "--load X", other_allowed=False) is None
    assert check_teacher("bb", Namespace(), "--kd-teacher-hf T", "--load X", other_allowed=False) is None
    with pytest.raises(MkdConfigError, match=r"teacher aa, --kd-teacher-hf T is bb.*--kd-other-teacher"):
        check_teacher("bb", stored, "--kd-teacher-hf T", "--load X", other_allowed=False)
    assert "aa" in check_teacher("bb", stored, "--kd-teacher-hf T", "--load X", other_allowed=True)


def test_changed_settings_are_listed() -> None:
    assert changed_settings({"kd_ratio": 0.5, "seed": 1}, {"kd_ratio": 0.9, "seed": 1, "new": 1}) == [
        "--kd-ratio 0.5 -> 0.9"
    ]


def test_second_job_in_a_folder_takes_over(tmp_path: Path, one_rank: None) -> None:
    save = tmp_path / "save"
    first, second = Saving(save, hashes=True), Saving(save, hashes=True)
    first.claim()
    first.before(save / name_of(2))
    second.claim()
    second.before(save / name_of(2))
    with pytest.raises(MkdCheckpointError, match=r"another job has claimed this folder: process \d+ on .*, started 20"):
        first.before(save / name_of(4))
    assert not (save / name_of(4)).exists()
    (save / OWNER).unlink()  # removed by hand
    second.before(save / name_of(4))


def test_replacing_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError, match="stop"), replacing(path) as out:
        out.write("half")
        raise ValueError("stop")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with replacing(path) as out:
        out.write("new")
    assert path.read_text() == "new"


def test_unreadable_folder_is_not_damaged(save: Path) -> None:
    """A temporary failure of the file system must not set a checkpoint aside."""
    (save / name_of(6) / "metadata.json").unlink()
    (save / name_of(6) / "metadata.json").mkdir()  # unreadable as a file, even for root
    before = listing(save)
    with pytest.raises(MkdCheckpointError, match=r"iter_0000006 cannot be read \(.*Is a directory"):
        select(save, own=True, step=None)
    assert listing(save) == before


@pytest.mark.parametrize("exists", [False, True])
def test_room_is_checked_before_anything_changes(
    tmp_path: Path, one_rank: None, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room, the folder of the iteration is not touched."""
    save = tmp_path / "save"
    saving = Saving(save, hashes=True)
    saving.claim()
    if exists:
        write_checkpoint(save / name_of(2), 1.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**30, free=2**20))
    saving.before(save / name_of(4), 2**20 * 100 // 102)
    with pytest.raises(OSError, match=r"No space left on device|it needs 0.001 GiB"):
        saving.before(save / name_of(2), 2**20)
    assert (save / name_of(2)).is_dir() == exists
    assert not (save / f"replaced_{name_of(2)}").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, free=0))
    saving.before(save / name_of(6), 2**40)  # a file system that does not report its size
