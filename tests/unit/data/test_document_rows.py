"""Rows of documents that are made again under the same prefix: those of the data as it is now."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from mkd.data.datasets import build_datasets
from mkd.data.sources.document_rows import DocumentRows
from mkd.data.sources.index_files import require_integers
from mkd.errors import MkdError
from tests.support.e2e.small_job import VOCAB, write_data
from tests.unit.data.test_row_sets import ROW, Ids, root, sets_of, unpacked  # noqa: F401  (root is a fixture)

OLD = [[1] * 80] * 10


def config_of(folder: Path, names: list[str], cache: Path | None) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=5,
        sequence_length=ROW,
        blend=([str(folder / name) for name in names], None if len(names) == 1 else [0.5, 0.5]),
        split="50,50,0",
        path_to_cache=None if cache is None else str(cache),
        tokenizer=Ids(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )


def rows(config: GPTDatasetConfig) -> tuple[list[Any], list[Any]]:
    train, valid, _ = build_datasets(config, [12, 6, 0], evaluated=6)
    return [train[i]["tokens"] for i in range(12)], [valid[i]["tokens"] for i in range(6)]


def index_files(*folders: Path) -> dict[Path, int]:
    """Each index file and its time of modification."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files if "_index" in path.name}


@pytest.mark.parametrize("own_folder", [True, False], ids=["data cache", "beside the data"])
@pytest.mark.parametrize("names", [["text"], ["text", "other"]], ids=["one file", "blend"])
@pytest.mark.parametrize(
    "new", [OLD + [[2] * 80] * 30, [[2] * 3] * 60, [[2] * 40, [2] * 120] * 5], ids=["more", "shorter", "same total"]
)
def test_data_that_is_made_again_is_read(tmp_path: Path, names: list[str], new: list[Any], own_folder: bool) -> None:
    cache = tmp_path / "cache" if own_folder else None
    write_data(tmp_path / "other", [[7] * 100] * 9)
    write_data(tmp_path / "text", OLD)
    rows(config_of(tmp_path, names, cache))
    write_data(tmp_path / "text", new)
    again = rows(config_of(tmp_path, names, cache))
    (tmp_path / "fresh").mkdir()
    write_data(tmp_path / "fresh" / "text", new)
    write_data(tmp_path / "fresh" / "other", [[7] * 100] * 9)
    fresh = rows(config_of(tmp_path / "fresh", names, None))
    for seen, expected in zip(again, fresh, strict=True):
        assert all(map(torch.equal, seen, expected))


def test_rows_of_a_blend_with_chats_follow_the_data(tmp_path: Path, root: Path) -> None:  # noqa: F811
    blend = ([str(tmp_path / "text"), "chat.jsonl"], [0.9, 0.1])
    write_data(tmp_path / "text", OLD)
    unpacked(sets_of(root, blend)[0]).build([20, 0, 0])
    write_data(tmp_path / "text", OLD[:5] + [[2] * 80] * 5 + [[3] * 33] * 9)
    sets, fresh = (unpacked(sets_of(root, blend)[0]) for _ in range(2))
    fresh.config.path_to_cache = str(tmp_path / "cache")
    for seen, expected in zip(sets.build([20, 0, 0])[0], fresh.build([20, 0, 0])[0], strict=True):
        assert torch.equal(seen["tokens"], expected["tokens"])


@pytest.mark.parametrize("names", [["text"], ["text", "other"]], ids=["one file", "blend"])
def test_unchanged_data_finds_its_index_files(tmp_path: Path, names: list[str]) -> None:
    write_data(tmp_path / "other", [[7] * 100] * 9)
    write_data(tmp_path / "text", OLD)
    config = config_of(tmp_path, names, tmp_path / "cache")
    before = rows(config)
    files = index_files(tmp_path)
    write_data(tmp_path / "text", OLD)  # another time of modification, the same content
    after = rows(config_of(tmp_path, names, tmp_path / "cache"))
    assert files and index_files(tmp_path) == files
    for seen, expected in zip(after, before, strict=True):
        assert all(map(torch.equal, seen, expected))


def test_rows_are_those_of_megatron(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 150, (40,), generator=random).tolist()
    write_data(tmp_path / "text", [torch.randint(1, VOCAB - 1, (n,), generator=random).tolist() for n in lengths])
    ours, theirs = (
        BlendedMegatronDatasetBuilder(kind, [60, 8, 0], lambda: True, config_of(tmp_path, ["text"], None)).build()
        for kind in (DocumentRows, GPTDataset)
    )
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert len(mine) == len(other)
        for i in range(len(mine)):
            assert all(torch.equal(value, other[i][name]) for name, value in mine[i].items())


class Bomb:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mknod, (str(self.mark),)


def changed(array: np.ndarray, value: Any) -> bytes:
    """An .npy file with another first element."""
    out, found = io.BytesIO(), np.array(array)
    found.flat[0] = value
    np.save(out, found)
    return out.getvalue()


ENDS = ("document_index", "shuffle_index", "dataset_index", "dataset_sample_index")
DAMAGES = [(kind, end) for kind in ("objects", "outside") for end in ENDS]
DAMAGES += zip(("floats", "another", "cut", "longer"), ENDS, strict=True)
DAMAGES += [("a header of code", "sample_index"), ("pipe", "dataset_index")]


@pytest.mark.parametrize(("kind", "end"), DAMAGES)
def test_damaged_index_files(tmp_path: Path, kind: str, end: str) -> None:
    """Damaged files of rows and blends: no pickle is read, and no other row is returned."""
    write_data(tmp_path / "other", [[7] * 100] * 9)
    write_data(tmp_path / "text", OLD)
    config = config_of(tmp_path, ["text", "other"], tmp_path / "cache")
    rows(config)
    file = next((tmp_path / "cache").glob(f"*-train-{end}.npy"))
    array, content = np.load(file), file.read_bytes()
    out = io.BytesIO()
    np.save(out, np.array([Bomb(tmp_path / "ran")] * len(array)), allow_pickle=True)
    damaged = {
        "objects": out.getvalue(),
        "floats": changed(array.astype(np.float64), 0.5),
        "outside": changed(array, 10_000),
        "another": changed(array, array.flat[0] + 1 if array.flat[0] == 0 else 0),
        "cut": content[:-1],
        "longer": content + b"0",
        "a header of code": content[:10] + b"(" * 100 + content[110:],
        "pipe": content,
    }[kind]
    file.write_bytes(damaged)
    if kind == "outside":  # as in a set of an older version
        for checksums in (tmp_path / "cache").glob("*checksums.json"):
            checksums.unlink()
    message = r"damaged.*: delete these index files"
    if kind == "pipe":  # the set is incomplete
        file.unlink()
        os.mkfifo(file)
        message = "is a named pipe"
    with pytest.raises(MkdError, match=message):
        rows(config_of(tmp_path, ["text", "other"], tmp_path / "cache"))
    assert not (tmp_path / "ran").exists()


def test_a_blend_that_was_not_written_whole_is_made_again(tmp_path: Path) -> None:
    write_data(tmp_path / "other", [[7] * 100] * 9)
    write_data(tmp_path / "text", OLD)
    before = rows(config_of(tmp_path, ["text", "other"], tmp_path / "cache"))
    next((tmp_path / "cache").glob("*-train-dataset_sample_index.npy")).unlink()
    after = rows(config_of(tmp_path, ["text", "other"], tmp_path / "cache"))
    for seen, expected in zip(after, before, strict=True):
        assert all(map(torch.equal, seen, expected))


def test_the_header_of_an_array_is_bounded(tmp_path: Path) -> None:
    """numpy evaluates a header of any size where pickles are allowed."""
    content = b"{'descr': '<i4', 'fortran_order': False, 'shape': (0,)}".ljust(20_000) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x02\x00" + len(content).to_bytes(4, "little") + content)
    with pytest.raises(ValueError, match=r"a\.npy has no header of an array"):
        require_integers(tmp_path / "a.npy")
