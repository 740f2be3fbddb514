"""tools/cache_teacher.py: refusals before a weight is loaded, and the commands on finished caches."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mkd.cli import cache
from mkd.errors import MkdCacheError, MkdConfigError, MkdError
from mkd.job.cache_build.job import CacheJob, CacheOptions
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter
from tests.e2e.test_bad_input import forget_megatron
from tests.support.cached_targets import meta_of, some_segment
from tests.support.e2e import small_job
from tests.support.e2e.small_job import ROOT, TEACHER, VOCAB, SmallJob, make_model, make_small_job, make_tokenizer, run

TOOL = ROOT / "tools" / "cache_teacher.py"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
ALONE: dict[str, Any] = {"--kd-student-hf": None, "--kd-ratio": None, "--lr": None, "--eval-interval": None}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    root = tmp_path_factory.mktemp("tool")
    job = make_small_job(root)
    make_model(root / "three_layers", make_tokenizer(), 3, {**TEACHER, "num_hidden_layers": 3})
    (root / "file").touch()
    (root / "foreign").mkdir()
    (root / "foreign" / "notes.txt").touch()
    return job


@pytest.fixture
def attempt(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CacheJob]]:
    """`attempt(own, changes, ranks)`: check a command line of `write` as rank 0 of `ranks` ranks."""

    def check(own: dict[str, Any], changes: dict[str, Any] | None = None, ranks: int = 1) -> CacheJob:
        for name, value in {**small_job.environment(), "WORLD_SIZE": str(ranks)}.items():
            monkeypatch.setenv(name, value)
        flags = [word.replace("{root}", str(job.root)) for word in job.flags({**ALONE, **(changes or {})})]
        monkeypatch.setattr(sys, "argv", ["cache_teacher.py", *flags])
        forget_megatron()
        options = CacheOptions(**{"out": job.root / "targets", "top_k": 8, **own})
        made = CacheJob.from_command_line(options)
        made.check_folder()
        return made

    before = dict(os.environ)
    yield check
    forget_megatron()
    os.environ.clear()
    os.environ.update(before)


def test_without_a_student(attempt: Callable[..., CacheJob], job: SmallJob) -> None:
    made = attempt({})
    assert made.meta.true_vocab == VOCAB and made.meta.teacher == made.teacher.source.fingerprint()
    assert (made.meta.values, made.meta.temperatures, made.meta.positions) == ("log12", (1.0,), "segment")
    assert made.args.tokenizer_model == str(job.teacher)
    assert attempt({}, {"--kd-student-hf": job.student}).meta == made.meta


def test_flags_of_the_student_are_ignored(attempt: Callable[..., CacheJob]) -> None:
    flags = {"--num-layers": 6, "--hidden-size": 64, "--num-attention-heads": 8, "--save": "{root}/never"}
    flags |= {"--lr": 1e-3, "--min-lr": 1e-4, "--lr-warmup-iters": 100, "--lr-decay-style": "WSD"}
    flags |= {"--save-interval": 5, "--kd-hidden-loss": "3:2", "--num-layers-per-virtual-pipeline-stage": 3, PP: 2}
    assert attempt({}, flags, ranks=2).teacher.config.transformer.num_layers == TEACHER["num_hidden_layers"]
    assert not (attempt({}).out.parent / "never").exists()


@pytest.mark.parametrize(
    ("own", "changes", "temperatures"),
    [
        ({}, {"--kd-temperature": 2}, (1.0, 2.0)),
        ({"temperatures": (3.0, 1.0)}, {"--kd-temperature": 2}, (1.0, 3.0)),
        ({"top_k": None, "samples": 5}, {"--kd-temperature": 2}, (1.0, 2.0)),
    ],
)
def test_temperatures(
    attempt: Callable[..., CacheJob], own: dict[str, Any], changes: dict[str, Any], temperatures: tuple[float, ...]
) -> None:
    assert attempt(own, changes).meta.temperatures == temperatures


def test_dry_run(job: SmallJob, tmp_path: Path) -> None:
    """Prints the plan and writes nothing."""
    words = [
        "write",
        "--out",
        str(tmp_path / "cache"),
        "--top-k",
        "8",
        "--",
        *job.flags({**ALONE, "--kd-dry-run": True}),
    ]
    done = run(words, script=TOOL)
    assert done.status == 0, done.errors[-3000:]
    assert "the 8 most probable tokens, values log12" in done.output and "mkd: keys" in done.output
    assert not (tmp_path / "cache").exists()


def test_positions(attempt: Callable[..., CacheJob], job: SmallJob, tmp_path: Path) -> None:
    """Rotary embeddings do not read position ids, and a table of learned positions does."""
    with pytest.raises(MkdConfigError, match="--reset-position-ids has no effect on the teacher: positions of type"):
        attempt({}, {"--reset-position-ids": True})
    sizes = {"--num-layers": 2, "--hidden-size": 32, "--num-attention-heads": 4, "--max-position-embeddings": 32}
    tokenizer = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": job.teacher}
    saved = {"--save": tmp_path, "--save-interval": 1, "--train-iters": 1, "--eval-iters": 0, "--kd-ratio": 0}
    done = run(job.flags({"--kd-student-hf": None, **sizes, **tokenizer, **saved, "--reset-position-ids": True}))
    assert done.status == 0, done.errors[-3000:]
    teacher = {"--kd-teacher-hf": None, "--kd-teacher-load": tmp_path, **tokenizer}
    assert attempt({}, {**teacher, "--reset-position-ids": True}).meta.positions == "document"


def test_more_samples_than_tokens(attempt: Callable[..., CacheJob]) -> None:
    meta = attempt({"top_k": None, "samples": 500}).meta
    assert (meta.top_k, meta.samples, meta.values) == (VOCAB, 500, "counts")


@pytest.mark.parametrize(
    ("own", "changes", "ranks", "message"),
    [
        ({"top_k": VOCAB + 1}, {}, 1, f"--top-k is {VOCAB + 1}, but the vocabulary has {VOCAB} tokens"),
        ({"top_k": 0}, {}, 1, "--top-k is 0"),
        ({"top_k": None}, {}, 1, "one of --top-k K .* and --sample N"),
        ({"samples": 5}, {}, 1, "--top-k 8 and --sample 5"),
        ({"top_k": None, "samples": 5000}, {}, 1, "--sample is 5000; it must be 1 to 4095"),
        ({"top_k": None, "samples": 5, "lossless": True}, {}, 1, "--lossless does not work with --sample"),
        ({"top_k": None, "samples": 5, "temperatures": (1.0, 2.0)}, {}, 1, "--temperature has 2 values"),
        ({"temperatures": (0.0,)}, {}, 1, "--temperature is 0"),
        ({}, {"--kd-teacher-hf": None}, 1, "exactly one teacher source"),
        ({}, {"--kd-teacher-hf": None, "--kd-teacher-cache": "{root}/x"}, 1, "is no teacher to run"),
        (
            {},
            {"--kd-teacher-url": "tcp://127.0.0.1:1"},
            1,
            "--kd-teacher-url tcp://127.0.0.1:1 .* is no teacher to run",
        ),
        ({}, {"--kd-teachers-mode": "select"}, 1, "--kd-teachers-mode select .* has no effect: leave it out"),
        ({}, {"--kd-teacher-hf": ["{root}/teacher", "{root}/student"]}, 1, "several teachers"),
        (
            {},
            {"--kd-teacher-tensor-model-parallel-size": 2},
            2,
            "-size 2 is for a job with a student, .* give --tensor",
        ),
        ({}, {"--kd-teacher-hf": "{root}/three_layers", PP: 2}, 2, "does not divide the 3 layers of the teacher"),
        ({}, {TP: 4}, 4, "does not divide the 6 attention heads of the teacher"),
        ({}, {"--seq-length": 100}, 1, "longer than the teacher's 96 positions"),
        ({}, {"--seq-length": None}, 1, "--seq-length is missing"),
        ({}, {"--train-iters": None}, 1, "--train-iters is missing"),
    ],
)
def test_refused_flags(
    attempt: Callable[..., CacheJob], own: dict[str, Any], changes: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(MkdConfigError, match=message):
        attempt(own, changes, ranks)


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({"out": "foreign"}, {}, "is not a teacher cache, and not empty"),
        ({"out": "file"}, {}, "cannot be written"),
        ({"out": "new"}, {"--data-cache-path": "{root}/new"}, "is the data cache of this job"),
        ({"out": "new"}, {"--data-cache-path": "{root}/new/cache"}, "new holds .*/new/cache, the data cache"),
        ({"out": "cache"}, {"--data-cache-path": None}, "is the data cache of this job"),
        ({"out": "file/cache"}, {}, "cannot be written"),
        ({"out": "eight"}, {"--kd-teacher-hf": "{root}/student"}, "other properties .*teacher: "),
        ({"out": "eight", "top_k": 9}, {}, r"other properties .*: top_k: 9, 8\)"),
        ({"out": "eight", "lossless": True}, {}, r"other properties .*: values: fp32, log12\)"),
        ({"out": "eight"}, {"--kd-teacher-dtype": "bf16"}, "other properties .*teacher_dtype: bfloat16, float32"),
    ],
)
def test_refused_folders(
    attempt: Callable[..., CacheJob], job: SmallJob, own: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    StoreWriter(job.root / "eight", attempt({}).meta)
    with pytest.raises(MkdCacheError, match=message):
        attempt({**own, "out": job.root / own["out"]}, changes)


def test_training_flags_before_the_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cache.run(["write", "--out", "never", "--top-k", "8", "--kd-teacher-hf", "x"])
    assert "--kd-teacher-hf x (flags of mkd train go after --)" in capsys.readouterr().err


@pytest.fixture
def caches(tmp_path: Path) -> list[Path]:
    """Two caches with a segment in common, and one of another teacher."""
    folders = [tmp_path / name for name in ("one", "two", "other")]
    held = (((0, 1), "t" * 32), ((1, 2, 3), "t" * 32), ((4,), "u" * 32))
    for folder, (numbers, teacher) in zip(folders, held, strict=True):
        writer = StoreWriter(folder, meta_of(teacher=teacher))
        for number in numbers:
            writer.add(*some_segment(number, 307, 8))
            writer.flush()
    return folders


def test_merge(caches: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged"
    cache.run(["merge", str(out), str(caches[0]), str(caches[1])])
    printed = capsys.readouterr().out
    assert "1 duplicates left out" in printed and "segments    4" in printed
    assert "the 8 most probable tokens, fp32" in printed
    merged = TeacherStore(out, "merged")
    assert merged.keys() == {some_segment(n, 307, 8)[0] for n in range(4)} and len(merged) == 4
    cache.run(["verify", str(out)])
    assert "every record is intact" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(MkdCacheError, match="exists: give the name of a new folder"):
        cache.run(["merge", str(out), str(caches[0])])
    with pytest.raises(MkdCacheError, match=r"cannot be merged \(teacher: "):
        cache.run(["merge", str(tmp_path / "new"), str(caches[0]), str(caches[2])])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("teacher", ["t" * 32, "u" * 32])
def test_merge_after_a_killed_merge(caches: list[Path], tmp_path: Path, teacher: str) -> None:
    """The partial folder of the killed merge is removed, also if it merged caches of another teacher."""
    partial = tmp_path / ".merged.partial"
    StoreWriter(partial, meta_of(teacher=teacher)).add(*some_segment(9, 307, 8))
    (partial / "rest").touch()
    cache.run(["merge", str(tmp_path / "merged"), str(caches[0])])
    assert len(TeacherStore(tmp_path / "merged", "merged")) == 2 and not partial.exists()


def test_verify_names_every_damaged_shard(caches: list[Path], capsys: pytest.CaptureFixture) -> None:
    shards = sorted(caches[1].glob("*.safetensors"))
    content = bytearray(shards[0].read_bytes())
    content[-40] ^= 1
    shards[0].write_bytes(content)
    manifest = json.loads(shards[0].with_suffix(".json").read_text())
    shards[1].with_suffix(".json").unlink()
    shards[2].unlink()
    with pytest.raises(MkdCacheError, match="3 problems, named above: remove damaged shards"):
        cache.run(["verify", str(caches[1])])
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert len(lines) == 3 and manifest["sha256"]
    for line, shard, word in zip(lines, shards, ("SHA-256", "no .json file", "is missing"), strict=True):
        assert shard.name in line and word in line
    with pytest.raises(MkdError, match=r"verify .* is not a teacher cache"):
        cache.run(["verify", str(caches[1].parent)])


def test_verify_recomputes_targets(job: SmallJob, tmp_path: Path) -> None:
    """In another layout; a different teacher with the same fingerprint is detected by its targets."""
    out, few = tmp_path / "cache", {**ALONE, "--train-iters": 2, "--eval-iters": 0, "--split": "100,0,0"}
    done = run(["write", "--out", str(out), "--top-k", "8", "--", *job.flags(few)], script=TOOL)
    assert done.status == 0, done.errors[-3000:]
    done = run(["verify", str(out), "--segments", "5", "--", *job.flags({**few, TP: 2})], 2, script=TOOL)
    assert done.status == 0, done.errors[-3000:]
    assert "recomputed targets match those of 5 texts" in done.output
    store = TeacherStore(out, "--out")
    writer = StoreWriter(tmp_path / "other", replace(store.meta, teacher=student_fingerprint(job)))
    for shard in store.shards:
        for segment in shard.segments():
            writer.add_records(*segment)
    writer.flush()
    other = ["verify", str(tmp_path / "other"), "--", *job.flags({**few, "--kd-teacher-hf": job.student})]
    done = run(other, script=TOOL)
    assert done.status == 1 and "holds targets that differ from those of this teacher" in done.errors


def student_fingerprint(job: SmallJob) -> str:
    from mkd.checkpoint.hf.folder import HFFolder

    return HFFolder(job.student, "--kd-student-hf").fingerprint()
