"""The same conversations in all forms and files in which such data is found."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tests.support.chats import talk, write_lines

TALKS = [
    talk("What is this?", "A test.", system="Be brief."),
    talk("Grüße, 世界!", "Ünïcödé 🎈 here", "and now", "two\n\nlines"),
    talk("one", "two"),
]
"""Conversations that every form can hold."""

FROM = {"system": "system", "user": "human", "assistant": "gpt"}

Messages = list[dict[str, Any]]
Record = dict[str, Any]


def _system(messages: Messages) -> tuple[Record, Messages]:
    """The system prompt as a key of the record, and the other messages."""
    if messages[0]["role"] == "system":
        return {"system": messages[0]["content"]}, messages[1:]
    return {}, messages


def sharegpt(messages: Messages) -> Record:
    return {"conversations": [{"from": FROM[m["role"]], "value": m["content"]} for m in messages]}


def sharegpt_with_system(messages: Messages) -> Record:
    system, others = _system(messages)
    return {**sharegpt(others), **system, "id": 7}


def alpaca(messages: Messages) -> Record:
    system, others = _system(messages)
    texts = [m["content"] for m in others]
    history = [list(pair) for pair in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
    return {"instruction": texts[-2], "input": "", "output": texts[-1], "history": history, **system}


def parts(messages: Messages) -> Record:
    """Contents as lists of parts, cut in the middle."""
    cut = [(m, len(m["content"]) // 2) for m in messages]
    kinds = ("text", "output_text")
    return {
        "messages": [
            {**m, "content": [{"type": kind, "text": t} for kind, t in zip(kinds, (t[:n], t[n:]), strict=True)]}
            for m, n in cut
            for t in [m["content"]]
        ],
        "tools": "",
    }


def roles_in_conversations(messages: Messages) -> Record:
    return {"conversations": messages, "images": []}


FORMS: dict[str, Callable[[Messages], Record]] = {
    "messages": lambda messages: {"messages": messages},
    "sharegpt": sharegpt,
    "sharegpt_system": sharegpt_with_system,
    "alpaca": alpaca,
    "parts": parts,
    "roles": roles_in_conversations,
}
"""Name -> a conversation as a record. All of them are supervised alike."""


def write_gzip(file: Path, records: Sequence[Record]) -> Path:
    file.write_bytes(gzip.compress(_lines(records)))
    return file


def write_zstd(file: Path, records: Sequence[Record]) -> Path:
    with pa.CompressedOutputStream(str(file), "zstd") as stream:
        stream.write(_lines(records))
    return file


def write_array(file: Path, records: Sequence[Record]) -> Path:
    file.write_text(json.dumps(records, indent=2, ensure_ascii=False))
    return file


def write_bom(file: Path, records: Sequence[Record]) -> Path:
    file.write_bytes(b"\xef\xbb\xbf" + _lines(records))
    return file


def write_parquet(file: Path, records: Sequence[Record], row_group_size: int = 2) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(records)), file, row_group_size=row_group_size)
    return file


def write_arrow(file: Path, records: Sequence[Record]) -> Path:
    table = pa.Table.from_pylist(list(records))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file


def write_saved(folder: Path, records: Sequence[Record]) -> Path:
    """A folder as `datasets.save_to_disk` writes it, in two shards whose names do not sort in their order."""
    folder.mkdir()
    names = ["data-b.arrow", "data-a.arrow"]
    for name, some in zip(names, (records[:1], records[1:]), strict=True):
        write_arrow(folder / name, some)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_folder(folder: Path, records: Sequence[Record]) -> Path:
    folder.mkdir()
    write_lines(folder / "train-1.jsonl", list(records[:1]))
    write_gzip(folder / "train-2.jsonl.gz", records[1:])
    (folder / "README.md").write_text("# data")
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_matched(folder: Path, records: Sequence[Record]) -> Path:
    """The name returned is a glob."""
    folder.mkdir()
    write_parquet(folder / "train-00.parquet", records[:2])
    write_parquet(folder / "train-01.parquet", records[2:])
    write_parquet(folder / "test-00.parquet", records[:1])
    return folder / "train-*.parquet"


FILES: dict[str, Callable[[Path, Sequence[Record]], Path]] = {
    "chats.jsonl": write_lines,
    "array.json": write_array,
    "bom.jsonl": write_bom,
    "packed.jsonl.gz": write_gzip,
    "packed.jsonl.zst": write_zstd,
    "table.parquet": write_parquet,
    "table.arrow": write_arrow,
    "saved": write_saved,
    "folder": write_folder,
    "matched": write_matched,
}
"""Name -> writes three records or more under it, and returns the name for --data-path."""


def _lines(records: Sequence[Record]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
