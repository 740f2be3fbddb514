"""Conversions and saves on a full or vanished disk: one line, and nothing half written is left."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.data.sources.indexed import write_indexed_text
from mkd.data.sources.text import Encoding
from mkd.errors import MkdError, is_correctable
from mkd.job.cache_build.inspect import problems
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter
from mkd.utils.atomic_files import new_folder
from tests.support.cached_targets import meta_of, some_segment
from tests.support.chats import chat_tokenizer
from tests.support.hf_folders import make_llama
from tests.support.small_disk import small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        yield disk


def test_import(tmp_path: Path, disk: Path) -> None:
    model = make_llama(tmp_path / "model", hidden_size=96, intermediate_size=512, vocab_size=512)
    with pytest.raises((MkdError, OSError)) as caught:
        import_hf(HFFolder(model, "--hf"), disk / "out", torch.float32)
    assert is_correctable(caught.value)
    assert str(disk) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert "GiB are free" in str(caught.value) or "No space left" in str(caught.value)
    assert not any((disk / "out").rglob("*")) and list(disk.glob(".*")) == []


def test_preprocess(tmp_path: Path, disk: Path) -> None:
    model = tmp_path / "model"
    chat_tokenizer(model, None)
    (tmp_path / "text.txt").write_text("a b " * 400_000)
    encoding = Encoding(str(model), append_eod=False)
    with pytest.raises(OSError, match=r"No space left on device.*: '.*disk/text'") as caught:
        write_indexed_text([str(tmp_path / "text.txt")], str(disk / "text"), encoding, workers=1)
    assert is_correctable(caught.value) and list(disk.iterdir()) == []


def test_cache(disk: Path) -> None:
    """Stored records stay, and a later job stores the rest."""
    meta = meta_of(top_k=8)
    writer = StoreWriter(disk / "cache", meta, shard_bytes=1 << 16)
    with pytest.raises(OSError, match=r"No space left on device: '.*disk/cache/shard-") as caught:
        for number in range(600):
            writer.add(*some_segment(number, 307, 8))
    assert is_correctable(caught.value)
    assert not list((disk / "cache").glob(".*"))
    stored = len(TeacherStore(disk / "cache", "--cache"))
    assert stored and problems(disk / "cache", "verify") == []


def test_new_folders(disk: Path) -> None:
    """Exports, prunings and merges."""
    with pytest.raises(OSError, match=r"No space left on device: '.*disk/out'"), new_folder(disk / "out") as made:
        (made / "weights").write_bytes(bytes(1 << 20))
    assert list(disk.iterdir()) == []
