"""No command connects to another machine."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_written_by_715961d import OTHER_TOKENIZER, PACKED, WRITTEN, OldJob
from tests.support.e2e.offline import destination
from tests.support.e2e.small_job import ROOT, Result, run

GUARD = ROOT / "tests" / "support" / "e2e" / "offline.py"
PRETRAIN = ROOT / "pretrain_kd.py"


def tool(name: str) -> Path:
    return ROOT / "tools" / f"{name}.py"


@pytest.fixture
def job(tmp_path: Path) -> OldJob:
    return OldJob(Path(shutil.copytree(WRITTEN, tmp_path / "job")))


@pytest.fixture
def offline(tmp_path: Path) -> Callable[..., Result]:
    """`offline(script, words)`: run a script with the guard; fails if it tried to leave the machine."""

    def start(script: Path, *words: object, ranks: int = 1, attempts: tuple[str, ...] = ()) -> Result:
        record = tmp_path / "record"
        result = run([str(record), str(script), *map(str, words)], ranks, script=GUARD)
        seen = record.read_text().splitlines() if record.is_file() else []
        assert seen == list(attempts)
        assert attempts or result.status == 0, result.output[-3000:] + result.errors[-6000:]
        return result

    return start


def test_a_training_and_its_export(job: OldJob, offline: Callable[..., Result]) -> None:
    """Chats, a teacher with another tokenizer, two ranks, Hugging Face folders beside the checkpoints."""
    save, flags = job.root / "save", {"--save-interval": 2, "--kd-save-hf-interval": 2, "--train-iters": 2}
    words = job.flags({**PACKED, **flags, "--save": save})
    offline(PRETRAIN, *words, ranks=2)
    offline(PRETRAIN, *job.flags({**OTHER_TOKENIZER, "--kd-metrics-file": job.root / "m.jsonl"}))
    offline(tool("convert"), "export", "--load", save, "--hf", job.root / "hf")


def test_tools(job: OldJob, offline: Callable[..., Result]) -> None:
    root = job.root
    texts = ("--input", root / "corpus.jsonl", "--tokenizer-model", root / "student")
    offline(tool("preprocess"), *texts, "--output-prefix", root / "out")
    pair = ("--student", root / "student", "--teacher", root / "other_teacher")
    offline(tool("build_projection"), *pair, "--out", root / "new.safetensors")
    offline(tool("cache_teacher"), "info", root / "cache_log12")
    offline(tool("prune"), "depth", "--hf", root / "student", "--out", root / "pruned", "--layers", "0")
    offline(tool("plot"), root / "documents" / "metrics.jsonl", "--out", root / "loss.png")


def test_the_guard_sees_connections(tmp_path: Path, offline: Callable[..., Result]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, urllib.request\n"
        "with contextlib.suppress(OSError):\n    urllib.request.urlopen('http://registry.invalid/x')\n"
    )
    offline(script, attempts=("http.client.connect registry.invalid",))


@pytest.mark.parametrize(
    ("event", "values", "host"),
    [
        ("socket.connect", (None, ("127.0.0.1", 80)), None),
        ("socket.connect", (None, "/run/socket"), None),
        ("socket.connect", (None, ("192.0.2.1", 80)), "192.0.2.1"),
        ("socket.getaddrinfo", ("registry.invalid", 443, 0, 0, 0), "registry.invalid"),
        ("socket.getaddrinfo", ("localhost", 443, 0, 0, 0), None),
        ("open", ("192.0.2.1",), None),
    ],
)
def test_destinations(event: str, values: tuple, host: str | None) -> None:
    assert destination(event, values) == host
