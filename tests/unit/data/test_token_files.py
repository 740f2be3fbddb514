"""Damaged token files: each is an error with the file and the document, before the work or at the read of the batch."""

import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mkd.data.checks import check_data
from mkd.data.datasets import build_datasets
from mkd.data.sources.chat import ChatTokenizer
from mkd.data.sources.indexed import INDEX_HEADER
from mkd.data.sources.stores import ChatStore, DocumentStore, chat_base, tokenize_chat
from mkd.data.sources.token_files import TokenFile, check_index
from mkd.errors import MkdDataError
from tests.support.chats import MARKED, chat_tokenizer, talk, write_lines
from tests.support.e2e.small_job import VOCAB, write_data
from tests.unit.data.test_document_rows import config_of

LENGTHS = [5, 3, 0, 40, 7]
COUNT = len(LENGTHS)
STARTS = INDEX_HEADER.size + 4 * COUNT
BOUNDS = STARTS + 8 * COUNT


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_data(tmp_path / "text", [list(range(1, n + 1)) for n in LENGTHS])


def put(path: str, offset: int, form: str, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(struct.pack(form, value))


CHANGES = {
    "another magic": (0, "<B", 1, "not an index of Megatron's"),
    "another version": (9, "<Q", 2, "version 2"),
    "no such dtype": (17, "<B", 9, "dtype code is 9"),
    "a dtype of floats": (17, "<B", 7, "dtype code is 7"),
    "another dtype": (17, "<B", 8, "document 1 starts at byte 20, but the documents before it end at byte 10"),
    "no sequences": (18, "<Q", 0, "lists no document"),
    "fewer sequences": (18, "<Q", COUNT - 1, "is damaged"),
    "2^62 sequences": (18, "<Q", 1 << 62, "is truncated"),
    "fewer bounds": (26, "<Q", COUNT, "is damaged"),
    "a negative length": (INDEX_HEADER.size + 4, "<i", -3, "document 1 has -3 tokens"),
    "a longer document": (INDEX_HEADER.size, "<i", 6, "document 1 starts at byte 20, but the .* end at byte 24"),
    "a longer last document": (STARTS - 4, "<i", 8, "has 220 bytes, its index describes 224"),
    "a long document": (INDEX_HEADER.size, "<i", (1 << 31) - 1, "(document 1 starts at byte 20|has 220 bytes)"),
    "another start": (STARTS + 8 * 3, "<q", 36, "document 3 starts at byte 36"),
    "a negative start": (STARTS, "<q", -4, "document 0 starts at byte -4, but the documents before it end at byte 0"),
    "bounds that fall": (BOUNDS + 8, "<q", 3, "do not rise from 0 .bound 2."),
    "a first bound": (BOUNDS, "<q", 1, "do not rise from 0"),
    "a last bound": (BOUNDS + 8 * COUNT, "<q", COUNT + 1, "ends at 6 of 5"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_damaged_index(prefix: Path, change: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkd.data.sources.token_files._BLOCK", block)
    check_data([str(prefix)], VOCAB, None)
    offset, form, value, words = CHANGES[change]
    put(f"{prefix}.idx", offset, form, value)
    with pytest.raises(MkdDataError, match=rf"--data-path {prefix}.*{words}"):
        check_data([str(prefix)], VOCAB, None)


def test_every_byte_of_the_index_counts(prefix: Path) -> None:
    """But those of the inner document bounds, which mkd does not use."""
    index = Path(f"{prefix}.idx")
    content = index.read_bytes()
    for offset in range(len(content)):
        for bit in (1, 0x80):
            index.write_bytes(content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :])
            os.utime(index, ns=(0, 2 * offset + (bit == 1)))  # one file per change for the cache of checks
            inner = BOUNDS + 8 <= offset < BOUNDS + 8 * COUNT
            with suppress(MkdDataError) if inner else pytest.raises(MkdDataError):
                check_index(str(prefix))


@pytest.mark.parametrize("size", [-1, 1])
def test_another_size(prefix: Path, size: int) -> None:
    content = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(content[:size] if size < 0 else content + b"x" * size)
    with pytest.raises(MkdDataError, match=rf"{len(content)} bytes expected, {len(content) + size} seen"):
        check_index(str(prefix))


def test_sequences_with_modes(prefix: Path) -> None:
    """Megatron's multimodal sets end with a byte per sequence."""
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(COUNT))
    assert check_index(str(prefix)).sequences == COUNT


READERS: dict[str, Callable[[str], None]] = {
    "rows": lambda prefix: [row["tokens"] for row in build(prefix)],
    "documents": lambda prefix: [DocumentStore(prefix, (0.0, 1.0), VOCAB).read(i, 0, n) for i, n in enumerate(LENGTHS)],
}


def build(prefix: str) -> list:
    config = config_of(Path(prefix).parent, [Path(prefix).name], Path(prefix).parent / "cache")
    config.split, config.split_matrix, config.sequence_length = "1,0,0", [(0.0, 1.0), None, None], 8
    train = build_datasets(config, [6, 0, 0], evaluated=0, true_vocab=VOCAB)[0]
    return [train[i] for i in range(6)]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("token", [-1, -5, VOCAB, 2**31 - 1])
def test_ids_are_checked_when_they_are_read(prefix: Path, reader: str, token: int) -> None:
    READERS[reader](str(prefix))
    put(f"{prefix}.bin", 4 * 9, "<i", token)
    with pytest.raises(MkdDataError, match=rf"--data-path {prefix}: document 3 has token id {token}"):
        READERS[reader](str(prefix))


def test_negative_ids_are_found_before_the_work(prefix: Path) -> None:
    put(f"{prefix}.bin", 4 * 9, "<i", -7)
    with pytest.raises(MkdDataError, match="has token id -7"):
        check_data([str(prefix)], VOCAB, None)


def test_truncated_while_it_is_read(prefix: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    store = DocumentStore(str(prefix), (0.0, 1.0))
    assert len(store.read(4, 0, 7)[0]) == 7
    os.truncate(f"{prefix}.bin", 4 * 50)
    with pytest.raises(MkdDataError, match=r"text.bin was truncated while it is read: it ends at byte 200, and 20 "):
        store.read(4, 0, 7)


def test_index_truncated_while_it_is_read(prefix: Path) -> None:
    store = DocumentStore(str(prefix), (0.0, 1.0))
    os.truncate(f"{prefix}.idx", 40)
    with pytest.raises(MkdDataError, match=r"text.idx was truncated while it is read: 40 bytes"):
        store.read(4, 0, 7)


def test_replaced_files_stay_readable(prefix: Path) -> None:
    store = DocumentStore(str(prefix), (0.0, 1.0))
    for suffix in (".bin", ".idx"):
        os.unlink(f"{prefix}{suffix}")
        Path(f"{prefix}{suffix}").touch()
    assert store.read(4, 0, 7)[0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_loader_workers_open_the_files_again(prefix: Path) -> None:
    put(f"{prefix}.bin", 4 * 9, "<i", VOCAB)
    copy = pickle.loads(pickle.dumps(TokenFile(str(prefix), VOCAB)))
    assert copy.get(0).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(MkdDataError, match="document 3"):
        copy.get(3)


def index_files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*"))


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("change", ["truncated", "another document", "another order", "another offset"])
def test_damaged_index_files_of_rows(prefix: Path, change: str, has_checksums: bool) -> None:
    build(str(prefix))
    if not has_checksums:  # as of an older version
        next((prefix.parent / "cache").glob("*-checksums.json")).unlink()
    files = {path.name.rpartition("-")[2]: path for path in index_files(prefix.parent)}
    name = {"another document": "document", "another order": "shuffle"}.get(change, "sample") + "_index.npy"
    if change == "truncated":
        os.truncate(files[name], files[name].stat().st_size - 8)
    else:
        values = np.load(files[name])
        values.reshape(-1)[1] = 1000
        np.save(files[name], values)
    with pytest.raises(MkdDataError, match=r"index files"):
        build(str(prefix))


def test_index_files_are_whole_or_absent(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while Megatron writes them leaves nothing that the next job reads."""

    def full(path: str, *args: object, **kwargs: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("17 requested and 0 written")  # as numpy reports it

    with monkeypatch.context() as patch, pytest.raises(MkdDataError, match=r"No space left on device.*data-cache-path"):
        patch.setattr(np, "save", full)
        build(str(prefix))
    assert index_files(prefix.parent) == []
    build(str(prefix))
    assert len(index_files(prefix.parent)) == 5


def test_a_read_only_folder(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch, pytest.raises(MkdDataError, match=r"Read-only file system.*--data-cache-path"):
        patch.setattr(os, "mkdir", refuse)
        build(str(prefix))


DAMAGE = {
    "an id": (".tokens", 4, VOCAB, "sample 0 has token id 307, the model's vocabulary 307 tokens"),
    "a bound": (".bounds", 8, 10**9, "do not rise"),
    "statistics": (".json", None, '{"conversations": "3"}', "is broken"),
}


@pytest.mark.parametrize("change", DAMAGE)
def test_damaged_stores_of_chats(tmp_path: Path, change: str) -> None:
    name = str(write_lines(tmp_path / "chat.jsonl", [{"messages": talk("a", "b c")}] * 3))
    tokenizer = ChatTokenizer(str(chat_tokenizer_folder(tmp_path)))
    base = chat_base(name, tokenizer, None)
    tokenize_chat(name, tokenizer, base, lambda line: None)
    assert len(ChatStore(base, (0.0, 1.0), VOCAB).read(0, 0, 3)[0]) == 3
    Path(f"{base}.checksums").unlink()  # as of an older version
    suffix, offset, value, words = DAMAGE[change]
    file = Path(f"{base}{suffix}")
    if offset is None:
        file.write_text(value)
    else:
        put(str(file), offset, "<q" if suffix == ".bounds" else "<I", value)
    with pytest.raises(MkdDataError, match=words):
        ChatStore(base, (0.0, 1.0), VOCAB).read(0, 0, 3)


def chat_tokenizer_folder(root: Path) -> Path:
    chat_tokenizer(root / "tokenizer", MARKED)
    return root / "tokenizer"


def test_stores_of_chats_truncated_while_they_are_read(tmp_path: Path) -> None:
    name = str(write_lines(tmp_path / "chat.jsonl", [{"messages": talk("a", "b c")}] * 3))
    tokenizer = ChatTokenizer(str(chat_tokenizer_folder(tmp_path)))
    base = chat_base(name, tokenizer, None)
    tokenize_chat(name, tokenizer, base, lambda line: None)
    store = ChatStore(base, (0.0, 1.0))
    os.truncate(f"{base}.tokens", 4)
    with pytest.raises(MkdDataError, match="was truncated while it is read: 4 bytes"):
        store.read(2, 0, 3)


def test_flipped_bits_in_index_files_of_rows(prefix: Path) -> None:
    before = [row["tokens"].tolist() for row in build(str(prefix))]
    files = index_files(prefix.parent)
    assert files
    for path in files:
        content = path.read_bytes()
        for offset in range(0, len(content), 13):
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
            with suppress(MkdDataError):
                assert [row["tokens"].tolist() for row in build(str(prefix))] == before, (path.name, offset)
        path.write_bytes(content)


def test_flipped_bits_in_stores_of_chats(tmp_path: Path) -> None:
    name = str(write_lines(tmp_path / "chat.jsonl", [{"messages": talk("a", "b c")}] * 3))
    tokenizer = ChatTokenizer(str(chat_tokenizer_folder(tmp_path)))
    base = chat_base(name, tokenizer, None)
    tokenize_chat(name, tokenizer, base, lambda line: None)
    for path in base.parent.glob(f"{base.name}.*"):
        content = path.read_bytes()
        for offset in range(0, len(content), 5):
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
            with pytest.raises(MkdDataError):
                ChatStore(base, (0.0, 1.0))
        path.write_bytes(content)
    assert ChatStore(base, (0.0, 1.0)).read(0, 0, 3)
