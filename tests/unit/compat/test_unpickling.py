"""mkd/compat/unpickling.py: a prepared checkpoint runs no code, and real ones of earlier commits load."""

import ast
import io
import json
import os
import pickle
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType

from mkd.checkpoint.megatron.folder import TRACKER, MegatronFolder
from mkd.checkpoint.megatron.integrity import find_damage
from mkd.compat.checkpoints import with_load_errors
from mkd.compat.unpickling import IndexUnpickler, allowed_classes_only, load_object, read_index
from mkd.errors import MkdCheckpointError
from tests.support.e2e.small_job import run
from tests.support.torch_dist_folders import SHARD

ROOT = Path(__file__).resolve().parents[3]
OLD = ROOT / "tests" / "fixtures" / "commit_715961d"
KEY = "common_state/shard_0_1"
PLACES = (".metadata", "common.pt", SHARD)


class Bomb:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mknod, (str(self.mark),)


def write_folder(folder: Path, place: str, bomb: object) -> None:
    """A checkpoint of one tensor and the arguments; `bomb` is stored in one of `PLACES`."""
    path = folder / "iter_0000001"
    path.mkdir(parents=True)
    common = {"args": Namespace(num_layers=1, iteration=1), "iteration": 1}
    stored = [{**common, "extra": bomb}] if place == SHARD else [common]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"a.weight": torch.ones(2, 2), KEY: stored}, checkpoint_id=path, planner=planner, no_dist=True)
    if place == ".metadata":
        (path / ".metadata").write_bytes(pickle.dumps(bomb))
    if place == "common.pt":
        torch.save({**common, "extra": bomb}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / TRACKER).write_text("1")


@pytest.fixture(params=PLACES)
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A hostile folder, and the file that its code creates."""
    write_folder(tmp_path / "ckpt", request.param, Bomb(tmp_path / "ran"))
    return tmp_path / "ckpt", tmp_path / "ran"


def test_arguments_of_a_hostile_folder_are_refused(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    with pytest.raises(MkdCheckpointError) as error:
        _ = MegatronFolder(folder, "--load").args
    assert str(error.value).startswith(f"--load {folder}: ")
    assert "mknod" in str(error.value) and "would run code" in str(error.value) and "\n" not in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_tools_refuse_a_hostile_folder(command: str, hostile: tuple[Path, Path], tmp_path: Path) -> None:
    folder, mark = hostile
    flags = ["--load", str(folder), *(["--hf", str(tmp_path / "hf")] if command == "export" else [])]
    found = run([command, *flags], script=ROOT / "tools/convert.py")
    assert found.status == 1
    last = found.errors.splitlines()[-1]
    assert last.startswith("error: --load") and "mknod" in last
    assert not mark.exists()


def test_megatron_refuses_a_hostile_folder(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    path = str(folder / "iter_0000001")
    with pytest.raises((MkdCheckpointError, pickle.UnpicklingError)):
        with_load_errors(lambda: dist_checkpointing.load_content_metadata(path))()
    with pytest.raises((MkdCheckpointError, pickle.UnpicklingError)):
        with_load_errors(lambda: dist_checkpointing.serialization.load_common_state_dict(path))()
    assert not mark.exists()


@pytest.mark.parametrize("value", ["2", 2.0, -1, True, 2**70, [2]])
def test_arguments_of_other_types_are_refused(value: object, tmp_path: Path) -> None:
    write_folder(tmp_path / "ckpt", "common.pt", None)
    stored = {"args": Namespace(num_layers=value, iteration=1), "iteration": 1}
    torch.save(stored, tmp_path / "ckpt" / "iter_0000001" / "common.pt")
    with pytest.raises(MkdCheckpointError, match=r"stores num_layers as .* which is not a number"):
        _ = MegatronFolder(tmp_path / "ckpt", "--load").args


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("pathlib", "Path"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ],
)
def test_an_index_that_changes_classes_is_refused(module: str, name: str) -> None:
    """A pickle sets attributes of what it names: here of a class instead of an object of it."""
    kind = getattr(sys.modules[module], name)
    names = [f"c{module}\n{name}\n".encode(), b"N}X\x04\x00\x00\x00makeK\x01s\x86b."]
    before = dict(vars(kind))
    with pytest.raises(MkdCheckpointError, match=f"changes {module}.{name} when it is read"):
        read_index(b"".join(names))
    assert dict(vars(kind)) == before


def test_memory_for_an_index_is_limited() -> None:
    """15 bytes that take 64 GiB: the index of an entry of the memo is the size of an array."""
    with pytest.raises(pickle.UnpicklingError, match="MemoryError"):
        read_index(b"N" + b"r" + (2**31 - 1).to_bytes(4, "little") + b".")
    with pytest.raises(pickle.UnpicklingError, match=r"MemoryError|truncated|EOF"):
        read_index(b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.")


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dict_metadata": 5},
        {"state_dict_metadata": {"a": 5}},
        {"state_dict_metadata": {5: BytesStorageMetadata()}},
        {"state_dict_metadata": {"a": TensorStorageMetadata(TensorProperties(), (2,), [])}},
        {"state_dict_metadata": {"a": TensorStorageMetadata(TensorProperties(), torch.Size([2]), [3])}},
        {"storage_data": {MetadataIndex("a"): _StorageInfo("x", -1, 4)}},
        {"storage_data": {MetadataIndex("a"): _StorageInfo(b"x", 0, 4)}},
        {"storage_data": {"a": 1}},
        {"storage_meta": "x"},
    ],
    ids=str,
)
def test_an_index_of_other_types_is_damage(changes: dict[str, object], tmp_path: Path) -> None:
    write_folder(tmp_path / "ckpt", ".metadata", None)
    content = {"state_dict_metadata": {}, "storage_data": {}, **changes}
    path = tmp_path / "ckpt" / "iter_0000001" / ".metadata"
    path.write_bytes(pickle.dumps(Metadata(**content)))
    assert find_damage(path.parent) == ".metadata is damaged (ValueError)"
    with pytest.raises(MkdCheckpointError, match="is damaged"):
        _ = MegatronFolder(tmp_path / "ckpt", "--load").metadata


def test_a_hostile_index_is_not_taken_for_damage(tmp_path: Path) -> None:
    """A job sets damaged checkpoints aside and resumes from an earlier one; this one needs a person."""
    write_folder(tmp_path / "ckpt", ".metadata", Bomb(tmp_path / "ran"))
    with pytest.raises(MkdCheckpointError, match="would run code"):
        find_damage(tmp_path / "ckpt" / "iter_0000001")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [b"torch.distributed.checkpoint.metadata\nMetadataIndey", b"uorch\nSize"])
def test_a_changed_name_is_damage(name: bytes, tmp_path: Path) -> None:
    write_folder(tmp_path / "ckpt", ".metadata", None)
    path = tmp_path / "ckpt" / "iter_0000001" / ".metadata"
    path.write_bytes(b"c" + name + b"\n.")
    assert find_damage(path.parent) == ".metadata is damaged (UnpicklingError)"


@pytest.mark.parametrize("operations", [b"(})}K\x01s.", b"X\x01\x00\x00\x00aK\x01K\x02s."])
def test_an_operation_on_another_object_is_damage(operations: bytes, tmp_path: Path) -> None:
    """A dictionary as a key; an item of a text."""
    write_folder(tmp_path / "ckpt", ".metadata", None)
    path = tmp_path / "ckpt" / "iter_0000001" / ".metadata"
    path.write_bytes(operations)
    assert find_damage(path.parent) == ".metadata is damaged (UnpicklingError)"


def test_an_index_with_the_plans_of_its_ranks_loads() -> None:
    """Under torch 2.14 Megatron leaves them in `.metadata`."""
    shape = torch.Size([2])
    chunk = ChunkStorageMetadata(torch.Size([0]), shape)
    data = TensorWriteData(chunk, TensorProperties(), shape)
    items = [
        WriteItem(MetadataIndex("a"), WriteItemType.SHARD, tensor_data=data),
        WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(1)),
    ]
    plans = [SavePlan(items)]
    read = IndexUnpickler(io.BytesIO(pickle.dumps(plans))).load()
    assert read == plans and type(read[0]) is SavePlan


def test_an_object_in_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt" / "iter_0000001"
    path.mkdir(parents=True)
    write_folder(tmp_path / "other", SHARD, Bomb(tmp_path / "ran"))
    shutil.copytree(tmp_path / "other", tmp_path / "ckpt", dirs_exist_ok=True)
    with pytest.raises(MkdCheckpointError, match="mknod"):
        MegatronFolder(tmp_path / "ckpt", "--load").load({KEY: "placeholder"})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["packed", "documents"])
def test_checkpoints_of_earlier_commits_load(name: str) -> None:
    folder = MegatronFolder(OLD / name, "--load")
    assert find_damage(folder.iteration_dir) is None
    assert folder.args.num_layers > 0
    assert folder.scheduler["num_steps"] > 0
    with allowed_classes_only():
        objects = [
            key
            for key, entry in folder.metadata.state_dict_metadata.items()
            if type(entry).__name__ == "BytesStorageMetadata"
        ]
        state = dict.fromkeys(objects, "placeholder")
        dcp.load(state, checkpoint_id=folder.iteration_dir, no_dist=True)  # random states and rerun states too
    assert "placeholder" not in state.values()


def test_arguments_in_a_file_of_their_own_load(tmp_path: Path) -> None:
    write_folder(tmp_path / "ckpt", "common.pt", None)
    assert MegatronFolder(tmp_path / "ckpt", "--load").args.num_layers == 1


def test_arrays_of_numpy_1_and_2_load() -> None:
    """As in the random states of checkpoints."""
    stored = {"array": np.arange(3, dtype=np.uint32), "number": np.float64(0.5), "whole": np.int64(2)}
    file = io.BytesIO()
    torch.save(stored, file, _use_new_zipfile_serialization=False)
    for content in (file.getvalue(), file.getvalue().replace(b"numpy._core", b"numpy.core")):
        found = load_object(io.BytesIO(content))
        assert found["array"].tolist() == [0, 1, 2] and (found["number"], found["whole"]) == (0.5, 2)


def test_torch_is_restored() -> None:
    before = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    with pytest.raises(KeyError), allowed_classes_only():
        raise KeyError
    assert before == (FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes)


def reading_calls(source: str) -> list[str]:
    """Calls that unpickle outside a block of `allowed_classes_only`, and others that always do."""
    tree, guarded = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any("allowed_classes_only" in ast.unparse(item) for item in node.items):
            guarded |= {id(inner) for inner in ast.walk(node)}
    names = ("read_metadata", "dcp.load", "load_common_state_dict", "load_content_metadata", "dist_checkpointing.load")
    others = ("load_args_from_checkpoint", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in guarded]
    texts = [(node.lineno, ast.unparse(node.func)) for node in calls]
    return [f"line {line}: {text}" for line, text in texts if text.endswith((*names, *others))]


def test_nothing_else_unpickles() -> None:
    files = [*(ROOT / "mkd").rglob("*.py"), *(ROOT / "tools").glob("*.py"), ROOT / "pretrain_kd.py"]
    found = {str(path.relative_to(ROOT)): reading_calls(path.read_text()) for path in files}
    assert [name for name, calls in found.items() if calls] == ["mkd/compat/unpickling.py"]


def test_unguarded_reads_are_found() -> None:
    source = "with allowed_classes_only():\n    dcp.load(a)\nreader.read_metadata()\ntorch.load(x)\n"
    assert reading_calls(source) == ["line 3: reader.read_metadata", "line 4: torch.load"]
