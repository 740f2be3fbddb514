"""Files of records: which are read, in which order, how much of them at a time, and what is refused."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from mkd.data.checks import check_data
from mkd.data.sources import record_files, text
from mkd.data.sources.data_files import data_files, is_record_data
from mkd.data.sources.stores import cache_base
from mkd.errors import MkdDataError
from tests.support.chats import write_lines
from tests.support.data_forms import write_arrow, write_gzip, write_parquet, write_saved, write_zstd
from tests.support.e2e.small_job import write_data


def records_of(name: Path | str) -> list[Any]:
    batches = text.read_batches(data_files(str(name), "--data-path"))
    return [json.loads(document) for batch in batches for document in batch.documents if document.strip()]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(root / name, [{"name": name}])


def names_of(name: Path | str, root: Path) -> list[str]:
    return [str(Path(file).relative_to(root)) for file in data_files(str(name), "--data-path")]


def test_names_that_stand_for_records(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.json.zst", "a.parquet", "a.arrow", "A.JSONL"):
        assert is_record_data(name)
    prefix = str(write_data(tmp_path / "text", [[1, 2, 3]]))
    (tmp_path / "text").mkdir()  # beside text.idx
    for name in (prefix, "corpus", "a.txt", "a.parquet.gz", "a.csv"):
        assert not is_record_data(name)
    assert is_record_data(str(tmp_path)) and is_record_data(f"{tmp_path}/*")
    write_data(tmp_path / "odd[1]", [[1, 2, 3]])
    assert not is_record_data(str(tmp_path / "odd[1]"))


def test_files_of_a_folder_and_a_glob(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a.jsonl", ".hidden.jsonl", "deep/c.jsonl", "deep/.d/e.jsonl")
    (tmp_path / "README.md").write_text("#")
    (tmp_path / "state-of-it.txt").write_text("#")
    assert names_of(tmp_path, tmp_path) == ["a.jsonl", "b.jsonl"]
    assert names_of(f"{tmp_path}/*", tmp_path) == ["a.jsonl", "b.jsonl"]
    assert names_of(f"{tmp_path}/[b-z].jsonl", tmp_path) == ["b.jsonl"]
    assert names_of(f"{tmp_path}/*/*.jsonl", tmp_path) == ["deep/c.jsonl"]
    assert names_of(f"{tmp_path}/**/*.jsonl", tmp_path) == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    touch(tmp_path, "odd[1].jsonl")
    assert names_of(tmp_path / "odd[1].jsonl", tmp_path) == ["odd[1].jsonl"]


def test_links(tmp_path: Path) -> None:
    """The Hub's cache is a folder of links; a link to a folder above is a loop."""
    touch(tmp_path, "blobs/1")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/a.jsonl").symlink_to("../blobs/1")
    (tmp_path / "snapshot/loop").symlink_to("../snapshot", target_is_directory=True)
    assert names_of(tmp_path / "snapshot", tmp_path) == ["snapshot/a.jsonl"]
    assert names_of(f"{tmp_path}/**/*.jsonl", tmp_path) == ["snapshot/a.jsonl"]
    (tmp_path / "snapshot/b.jsonl").symlink_to("b.jsonl")
    with pytest.raises(MkdDataError, match=r"b\.jsonl does not exist or is not a file"):
        names_of(tmp_path / "snapshot", tmp_path)


def test_a_file_of_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_text("{}")
    with pytest.raises(MkdDataError, match=r"--data-path .*/a\\xff\.jsonl: the name is not UTF-8 text"):
        names_of(tmp_path, tmp_path)


def test_saved_data_sets(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "dataset_dict.json").write_text('{"splits": ["train"]}')
    write_saved(whole / "train", [{"n": 1}, {"n": 2}, {"n": 3}])
    assert records_of(whole) == records_of(whole / "train") == [{"n": 1}, {"n": 2}, {"n": 3}]
    (whole / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        MkdDataError, match=rf"has the splits train, test: name one, such as {whole}/train \(mkd train: with"
    ):
        records_of(whole)


STATES = {
    "up": ({"_data_files": [{"filename": "../a.arrow"}]}, "lists no data files"),
    "none": ({"_data_files": []}, "lists no data files"),
    "missing": ({}, "lists no data files"),
    "other": ({"_data_files": [{"filename": "a.pkl"}]}, r"a\.pkl ends in '\.pkl'"),
    "rows": ({"_data_files": [{"filename": "data-a.arrow"}], "_indices_data_files": [1]}, "call flatten_indices"),
    "list": ([], "is a JSON list, not an object"),
}


@pytest.mark.parametrize("case", STATES)
def test_saved_data_sets_that_are_refused(tmp_path: Path, case: str) -> None:
    state, message = STATES[case]
    folder = write_saved(tmp_path / "saved", [{"n": 1}, {"n": 2}])
    touch(folder, "a.pkl", "../a.arrow")
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(MkdDataError, match=message):
        records_of(folder)
    (folder / "state.json").write_text("[" * 100_000)
    with pytest.raises(MkdDataError, match=r"state\.json is broken"):
        records_of(folder)


def test_folders_that_do_not_say_what_is_meant(tmp_path: Path) -> None:
    touch(tmp_path, "splits/train-0.jsonl", "splits/validation-0.jsonl", "kinds/a.jsonl", "deep/data/a.jsonl")
    write_parquet(tmp_path / "kinds/a.parquet", [{"n": 1}])
    (tmp_path / "none").mkdir()
    write_data(tmp_path / "none/text", [[1, 2]])
    for name, message in {
        "splits": r"of several splits \(train, validation\): name those of one by a glob in quotes, such "
        r"as '.*/valid.*' \(mkd train: in --train-data-path, ",
        "kinds": r"of several kinds \(\.jsonl, \.parquet\), which may hold the same data: name one kind by a glob",
        "deep": r"is a folder without data files: name one of its folders \(data\), or give a glob in quotes",
        "none": "token files are named by their PREFIX, such as .*/none/text$",
        "none/*.parquet": "matches no data file",
        "a**b/x": "is not a glob|matches no data file",
    }.items():
        with pytest.raises(MkdDataError, match=message):
            names_of(tmp_path / name, tmp_path)


def test_all_files_are_part_of_the_name_of_the_tokens(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl")

    def base() -> Path:
        return cache_base(
            str(tmp_path / "*.jsonl"), data_files(f"{tmp_path}/*.jsonl", "--data-path"), "k", None, "chat"
        )

    first = base()
    assert first == base() and first.parent == tmp_path / "cache" and "*" not in first.name
    os.utime(tmp_path / "b.jsonl", ns=(1, 1))
    second = base()
    touch(tmp_path, "c.jsonl")
    assert len({first, second, base()}) == 3


def test_tables_are_read_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that nobody needs are not read, and null keys of objects are left out."""
    rows = [{"n": i, "o": {"a": 1} if i % 2 else {"b": None}, "bytes": b"\xff", "text": None} for i in range(200)]
    expected = [{"n": i, "o": {"a": 1} if i % 2 else {}} for i in range(200)]
    table = write_parquet(tmp_path / "t.parquet", rows, row_group_size=150)
    arrow = write_arrow(tmp_path / "t.arrow", rows)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink:
        content = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(sink, content.schema) as writer:
            writer.write_table(content)
    sizes: list[int] = []
    to_pylist = pa.RecordBatch.to_pylist
    counted = SimpleNamespace(call=lambda batch: sizes.append(batch.num_rows) or to_pylist(batch))
    rows_of = record_files._rows
    monkeypatch.setattr(
        record_files,
        "_rows",
        lambda batches, path: rows_of((SimpleNamespace(to_pylist=lambda b=b: counted.call(b)) for b in batches), path),
    )
    for file in (table, arrow, tmp_path / "file.arrow"):
        batches = list(text.read_batches([str(file)], columns=lambda names: ["n", "o"], size=100))
        documents = [json.loads(document) for batch in batches for document in batch.documents]
        assert documents == expected
        assert batches[1].unit == "row" and batches[1].first == len(batches[0].documents) + 1
        assert all(batch.size >= 0 for batch in batches)
        assert sum(batch.size for batch in batches) <= file.stat().st_size
    assert max(sizes) <= 64
    assert records_of(table)[0]["bytes"] == "/w=="


def test_progress_counts_the_bytes_of_compressed_files(tmp_path: Path) -> None:
    records = [{"n": "x" * 1000} for _ in range(500)]
    for file in (write_gzip(tmp_path / "a.jsonl.gz", records), write_zstd(tmp_path / "a.jsonl.zst", records)):
        assert sum(batch.size for batch in text.read_batches([str(file)], size=50_000)) <= file.stat().st_size


ARRAYS = [
    "[]",
    " [ ]\n",
    "[1]",
    '[{"a": "]"}, {"b": "\\u00e9 \\" ,"},\n\n {"c": [1, {"d": 2}]}]',
    '\ufeff[\n{"ä": 1.5e3} ]',
]


@pytest.mark.parametrize("content", ARRAYS)
@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, block: int) -> None:
    monkeypatch.setattr(record_files, "_BLOCK_BYTES", block)
    file = tmp_path / "a.json"
    file.write_text(content)
    assert records_of(file) == json.loads(content.removeprefix("\ufeff"))


BROKEN = {
    "torn": ('[{"a": 1}, {"a": ', "record 2: broken JSON"),
    "string": ('[{"a": 1}, {"a": "bc', "record 2: broken JSON"),
    "comma": ('[{"a": 1} {"a": 2}]', r"broken JSON \('\{' stands where the array should go on after record 1"),
    "open": ('[{"a": 1}', r"broken JSON \(the file ends where the array should go on after record 1"),
    "open comma": ('[{"a": 1},', r"broken JSON \(the file ends where the array should go on after record 1"),
    "wrong": ('[{"a": 1}, {a: 2}, ' + '{"a": 3}, ' * 9000 + "{}]", "record 2: broken JSON .*one JSON array of objects"),
    "deep": ("[" + "[" * 100_000, "record 1: broken JSON .nested too deeply"),
    "digits": ("[" + "1" * 10_000 + "]", "record 1: broken JSON"),
    "more": ('[{"a": 1}]\n{"a": 2}', "the array ends after record 1, and more follows"),
    "latin": ('[{"a": "é"}]'.encode("latin-1"), "not UTF-8"),
    "utf-16": ("[]".encode("utf-16"), "not UTF-8 but UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_arrays(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    file = tmp_path / "a.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MkdDataError, match=message):
        records_of(file)


def cut_off(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-9])
    return file


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    records = [{"text": "".join(map(chr, range(300, 900)))} for _ in range(40)]
    files = [
        cut_off(write_gzip(tmp_path / "a.jsonl.gz", records)),
        cut_off(write_zstd(tmp_path / "a.jsonl.zst", records)),
        cut_off(write_parquet(tmp_path / "a.parquet", records)),
        cut_off(write_arrow(tmp_path / "a.arrow", records)),
    ]
    for kind in ("jsonl.gz", "jsonl.zst", "parquet", "arrow"):
        files.append(tmp_path / f"b.{kind}")
        files[-1].write_bytes(b"something else, long enough to be a file of any kind")
    for file in files:
        with pytest.raises(MkdDataError, match=r"cannot be read as (gzip|zstd|parquet|arrow) \(") as caught:
            records_of(file)
        assert str(caught.value).startswith(str(file)), file
    offsets = b"\0\0\0\0\x03\0\0\0"
    content = write_arrow(tmp_path / "c.arrow", [{"text": "abc"}]).read_bytes()
    before, _, after = content.rpartition(offsets)
    (tmp_path / "c.arrow").write_bytes(before + b"\0\0\0\0\xff\xff\xff\x7f" + after)
    with pytest.raises(MkdDataError, match=r"c\.arrow cannot be read as arrow"):
        records_of(tmp_path / "c.arrow")


def test_long_records_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may hold a line without an end."""
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 5 << 20)
    monkeypatch.setattr(record_files, "_BLOCK_BYTES", 1 << 16)
    bomb = b'{"a": "' + b"x" * (32 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n" + bomb))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bomb))
    (tmp_path / "a.json").write_bytes(b"[{}, " + bomb)
    write_parquet(tmp_path / "a.parquet", [{"a": "b"}, {"a": "x" * (6 << 20)}])
    for name, where in {
        "a.jsonl.gz": "line 2",
        "a.txt.gz": "document 1",
        "a.json": "record 2",
        "a.parquet": "row 2",
    }.items():
        with pytest.raises(MkdDataError, match=rf"{where} is longer than 5 MiB: cut it into several"):
            list(text.read_batches([str(tmp_path / name)]))
    read: list[int] = []
    with gzip.open(tmp_path / "a.jsonl.gz") as data:
        lines = record_files._lines(SimpleNamespace(readline=lambda n: read.append(n) or data.readline(n)), "f")
        with pytest.raises(MkdDataError):
            list(lines)
    assert max(read) == (5 << 20) + 1


def test_names_in_data_path_that_stand_for_nothing(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "a.txt", "a.xlsx"):
        (tmp_path / name).write_text("a,b\n")
    prefix = write_data(tmp_path / "text", [[1, 2]])
    write_data(tmp_path / "[my]corpus_text_document", [[1, 2]])
    for key in ("question", "answer"):
        write_data(tmp_path / f"qa_{key}_document", [[1, 2]])
    for name, message in {
        "a.csv": r"ends in '\.csv': .*convert it with python -c .*read_csv\('a\.csv'\), 'a\.parquet'\)",
        "a.tsv": r"delimiter='\\t'",
        "a.txt": r"plain text is made into token files first, by mkd preprocess --input",
        "a.xlsx": r"ends in '\.xlsx': records must end in \.jsonl or \.json or \.ndjson .*, \.parquet or \.arrow",
        "text.bin": f"named by their PREFIX: give {prefix}$",
        "gone": r"gone\.idx does not exist \(mkd preprocess makes it\)$",
        "[my]corpus": r"\(mkd preprocess makes it\); did you mean .*/\[my\]corpus_text_document\?$",
        "qa": r"qa\.idx does not exist \(mkd preprocess makes it\)$",
    }.items():
        with pytest.raises(MkdDataError, match=message):
            check_data([str(tmp_path / name)], 10, None)
    with pytest.raises(MkdDataError, match="hf download --repo-type dataset someone/chats --local-dir DIR"):
        check_data(["someone/chats"], 10, None)


def test_a_conversion_that_is_named_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.tsv").write_text("prompt\tcompletion\nWhat?\tThis.\n")
    with pytest.raises(MkdDataError) as caught:
        check_data(["a.tsv"], 10, None)
    exec(str(caught.value).split('"')[1])
    assert records_of("a.parquet") == [{"prompt": "What?", "completion": "This."}]
    assert parquet.read_table("a.parquet").num_rows == 1
