"""Reads through staging buffers by several threads, on the CPU: what ends on a GPU must be what the folder holds."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mkd.checkpoint import staged_reads
from mkd.checkpoint.safetensors_files import TensorEntry, read_header, write_tensors
from mkd.checkpoint.staged_reads import Staging

CPU = torch.device("cpu")
BLOCKS = [
    (None, None),
    (slice(2, 5), None),
    (slice(3, 3), None),
    (slice(1, 7), slice(0, 6)),
    (slice(0, 7), slice(2, 4)),
]


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, TensorEntry]:
    tensors = {
        "matrix": torch.arange(42.0).view(7, 6).bfloat16(),
        "experts": torch.randn(7, 6, 3, dtype=torch.float32, generator=torch.Generator().manual_seed(0)),
        "ints": torch.arange(42).view(7, 6),
    }
    write_tensors(tmp_path / "a.safetensors", tensors)
    return read_header(tmp_path / "a.safetensors", "--hf")


@pytest.mark.parametrize("nbytes", [5, 12, 1 << 20])
def test_blocks(entries: dict[str, TensorEntry], nbytes: int) -> None:
    staging = Staging(CPU, buffers=1, nbytes=nbytes)
    for entry in entries.values():
        for rows, cols in BLOCKS:
            expected = entry.read(rows, cols)
            found = staging.read(entry, rows, cols)
            assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_vector_and_scalar(tmp_path: Path) -> None:
    tensors = {"vector": torch.arange(5.0), "scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}
    write_tensors(tmp_path / "a.safetensors", tensors)
    staging = Staging(CPU, buffers=1, nbytes=8)
    for name, entry in read_header(tmp_path / "a.safetensors", "--hf").items():
        assert torch.equal(staging.read(entry, None, None), tensors[name])


def test_file_that_became_shorter(entries: dict[str, TensorEntry]) -> None:
    staging = Staging(CPU, buffers=1, nbytes=16)
    file = entries["ints"].file
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(OSError, match="ends 8 bytes before"):
        staging.read(entries["ints"], None, None)
    assert torch.equal(staging.read(entries["matrix"], None, None), entries["matrix"].read(None, None))


def test_threads_work_on_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the caller reads parameters that are not put together yet, where its stream is not the default one."""
    current = threading.local()

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        current.stream = stream
        yield
        current.stream = None

    def call() -> tuple[int, object]:
        return threading.get_ident(), getattr(current, "stream", None)

    monkeypatch.setattr(torch.cuda, "stream", on)
    side = object()
    for stream in (side, None):
        staging = Staging(CPU)
        staging.stream = stream
        found = list(staging.in_order((1, call) for _ in range(8)))
        assert [seen for _, seen in found] == [stream] * 8
        assert threading.get_ident() not in {thread for thread, _ in found}


def test_order_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "AHEAD_BYTES", 30)
    lock, running, started = threading.Lock(), [0], [0]

    def call(number: int) -> int:
        with lock:
            running[0] += 1
            started[0] += 1
            most.append(running[0])
        time.sleep(0.002 * (3 - number % 3))
        with lock:
            running[0] -= 1
        return number

    most: list[int] = []
    seen = []
    for value in Staging(CPU).in_order(((10, lambda n=n: call(n)) for n in range(20)), threads=4):
        seen.append(value)
        assert started[0] <= len(seen) + 3  # 30 bytes are ahead
    assert seen == list(range(20))
    assert 1 < max(most) <= 3


def test_error_comes_in_its_turn() -> None:
    def fail() -> int:
        raise ValueError("broken")

    results = Staging(CPU).in_order([(1, lambda: 0), (1, fail), (1, lambda: 2)], threads=2)
    assert next(results) == 0
    with pytest.raises(ValueError, match="broken"):
        next(results)
