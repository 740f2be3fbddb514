"""Files that commit 715961d wrote are read, and training continues from them as it did there.

The files are in tests/fixtures/commit_715961d, and its README.md says how they were made. Processors differ in the last
bits of their arithmetic, so that numbers may differ by `CLOSE` or `SMALL` from those that were written. With
MKD_EXACT=1 in the environment they must be the same to the last bit, and so must the weights and the state of the
optimizer after the last step: run it so on the machine, and with the versions of the packages, that made the files.
"""

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_resume import tensors
from tests.support.e2e.small_job import ROOT, Result, run

WRITTEN = ROOT / "tests" / "fixtures" / "commit_715961d"
IS_EXACT = os.environ.get("MKD_EXACT") == "1"
CLOSE = 1e-6
"""Relative."""
SMALL = 1e-7
"""Absolute: a divergence of 0.007 is what is left of cross-entropies near 6, with the rounding of those in fp32."""
CLOCK = re.compile(r"_s$|_per_gpu$|^peak_memory_gib$|^mfu$")
"""Fields of the metrics that say how fast or large a job was."""
CACHES = ["cache_log12", "cache_fp32", "cache_counts"]


@dataclass(frozen=True)
class OldJob:
    """A copy of the fixture, and the command lines of its make.sh."""

    root: Path

    def flags(self, changes: dict[str, Any]) -> list[str]:
        """Common flags and these; a value that names something in the fixture becomes its path."""
        flags = {
            "--kd-student-hf": "student",
            "--data-cache-path": self.root / "data_cache",
            "--split": "80,20,0",
            "--micro-batch-size": 2,
            "--global-batch-size": 4,
            "--train-iters": 4,
            "--lr-decay-iters": 8,
            "--eval-iters": 1,
            "--eval-interval": 1000,
            "--log-interval": 1,
            "--lr": 1e-3,
            "--num-workers": 0,
            "--make-vocab-size-divisible-by": 8,
            **changes,
        }
        words: list[str] = []
        for flag, value in flags.items():
            words += [flag] if value is True else [flag, self._placed(value)]
        return words

    def _placed(self, value: Any) -> str:
        is_text = value == "corpus_text_document"
        return str(self.root / value if is_text or (self.root / str(value)).exists() else value)

    def train(self, changes: dict[str, Any]) -> Result:
        result = run(self.flags(changes))
        assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
        return result

    def goes_on(self, save: str, changes: dict[str, Any]) -> Result:
        """Continue in a checkpoint's folder."""
        result = self.train({**changes, "--load": save, "--save": save, "--save-interval": 2})
        assert "successfully loaded checkpoint" in result.output
        assert "at iteration 2" in result.output
        return result

    def store(self, kind: str) -> Path:
        """Put the tokenized chats where commit 715961d would have put them for the copied file.

        The name is hashed from the path, size and time of the data, which are the copy's own, and from a key that is
        in the fixture.

        Returns:
            The folder of the data cache.
        """
        data, key = (self.root / "chats.jsonl").resolve(), (self.root / "stores" / f"{kind}.key").read_text()
        whole = f"{data} {data.stat().st_size} {data.stat().st_mtime_ns} {key}"
        name = f"chats-{blake2b(whole.encode(), digest_size=16).hexdigest()}-{kind}"
        folder = self.root / "data_cache"
        folder.mkdir(exist_ok=True)
        for file in (self.root / "stores").glob(f"{kind}.*"):
            if file.suffix != ".key":
                shutil.copyfile(file, folder / f"{name}{file.suffix}")
        return folder


DOCUMENTS: dict[str, Any] = {
    "--kd-teacher-hf": "teacher",
    "--data-path": "corpus_text_document",
    "--seq-length": 32,
    "--kd-ratio-schedule": "linear:0.2:0.9:4",
    "--kd-temperature-schedule": "linear:2:1:4",
    "--kd-balance": True,
    "--kd-hidden-loss": "1:1,2:2",
    "--attention-dropout": 0.1,
}
ROWS: dict[str, Any] = {
    "--data-path": "chats.jsonl",
    "--seq-length": 64,
    "--kd-packing": "best_fit",
    "--kd-packing-multiple": 8,
    "--kd-ratio": 0.5,
}
PACKED = {**ROWS, "--kd-teacher-hf": "teacher"}
OTHER_TOKENIZER = {**ROWS, "--kd-teacher-hf": "other_teacher", "--kd-xtoken-loss": "p_kl", "--train-iters": 2}


@pytest.fixture
def job(tmp_path: Path) -> OldJob:
    return OldJob(Path(shutil.copytree(WRITTEN, tmp_path / "job")))


def read_lines(name: str) -> list[dict[str, Any]]:
    """The metrics of commit 715961d."""
    return [json.loads(line) for line in (WRITTEN / "expected" / f"{name}.jsonl").read_text().splitlines()]


def differences(seen: Any, expected: Any, place: str = "", exact: bool = IS_EXACT) -> list[str]:
    """Places where two values of JSON are not the same; fields of `CLOCK`, and fields that only `seen` has, are not
    compared."""
    if isinstance(expected, dict) and isinstance(seen, dict):
        names = [name for name in expected if not CLOCK.search(name)]
        missing = [f"{place}.{name} is missing" for name in names if name not in seen]
        found = [differences(seen[name], expected[name], f"{place}.{name}", exact) for name in names if name in seen]
        return [*missing, *chain.from_iterable(found)]
    if isinstance(expected, list) and isinstance(seen, list):
        if len(seen) != len(expected):
            return [f"{place} has {len(seen)} entries instead of {len(expected)}"]
        found = [differences(*pair, f"{place}[{i}]", exact) for i, pair in enumerate(zip(seen, expected, strict=True))]
        return list(chain.from_iterable(found))
    is_number = isinstance(expected, float) and isinstance(seen, (int, float))
    if seen == expected or (is_number and not exact and math.isclose(seen, expected, rel_tol=CLOSE, abs_tol=SMALL)):
        return []
    return [f"{place} is {seen!r} instead of {expected!r}"]


def assert_metrics(result: Result, name: str) -> None:
    assert not differences(result.metrics, read_lines(name))


def assert_tensors(save: Path, name: str) -> None:
    """Names and shapes of all that a checkpoint stores; with MKD_EXACT=1 every bit of it."""
    expected = json.loads((WRITTEN / "expected" / f"{name}_tensors.json").read_text())
    seen = {key: [list(value.shape), digest(value)] for key, value in tensors(save).items()}
    assert seen.keys() == expected.keys()
    kept = slice(None) if IS_EXACT else slice(1)
    assert {key: value[kept] for key, value in seen.items()} == {key: value[kept] for key, value in expected.items()}


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def test_a_difference_is_found() -> None:
    """In every field of every line that is a number, if it is larger than what processors differ by."""
    lines = read_lines("documents")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4, 4]
    assert not differences(lines, lines, exact=True)
    assert not differences([*lines[:-1], {**lines[-1], "step_s": 7.0, "of_later_code": 1}], lines, exact=True)
    for number, line in enumerate(lines):
        for name, value in line.items():
            if not isinstance(value, float) or value == 0.0:
                continue
            for other, exact in ((value + 2 * max(CLOSE * value, SMALL), False), (math.nextafter(value, 1e9), True)):
                changed = [*lines[:number], {**line, name: other}, *lines[number + 1 :]]
                assert len(differences(changed, lines, exact=exact)) == 1, (number, name)
        without = {name: value for name, value in line.items() if name not in ("loss", "valid_loss")}
        assert differences([*lines[:number], without, *lines[number + 1 :]], lines)
    assert differences(lines[:-1], lines)


def test_documents_go_on(job: OldJob) -> None:
    """With maps between hidden states, a balance, schedules and dropout, whose states the checkpoint has."""
    result = job.goes_on("documents", DOCUMENTS)
    assert_metrics(result, "documents")
    assert_tensors(job.root / "documents", "documents")


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "tokenized_again"])
def test_packed_chats_go_on(job: OldJob, is_stored: bool) -> None:
    """From the tokens that were stored for the chats, and from the same tokenized again."""
    cache = job.store("chat") if is_stored else job.root / "data_cache"
    before = set(cache.glob("*-chat.*"))
    result = job.goes_on("packed", PACKED)
    assert_metrics(result, "packed")
    assert_tensors(job.root / "packed", "packed")
    assert ("tokenizing, once" in result.output) != is_stored
    assert (set(cache.glob("*-chat.*")) == before) == is_stored


def test_packed_chats_go_on_from_a_cache(job: OldJob) -> None:
    """A checkpoint of a run with the teacher itself resumes with the teacher's cached targets."""
    result = job.goes_on("packed", {**ROWS, "--kd-teacher-cache": "cache_log12"})
    assert_metrics(result, "packed_from_cache")
    assert_tensors(job.root / "packed", "packed_from_cache")


@pytest.mark.parametrize("cache", CACHES)
def test_cache_teaches(job: OldJob, cache: str) -> None:
    log = job.root / "metrics.jsonl"
    changes = {**ROWS, "--kd-teacher-cache": cache, "--train-iters": 2, "--kd-metrics-file": log}
    assert_metrics(job.train(changes), cache)


@pytest.mark.parametrize("cache", CACHES)
def test_cache_tool(job: OldJob, cache: str) -> None:
    """`info` describes a cache; `verify` finds every record intact, and the teacher's targets unchanged."""
    tool, folder = ROOT / "tools" / "cache_teacher.py", str(job.root / cache)
    facts = json.loads((job.root / cache / "meta.json").read_text())
    described = run(["info", folder], script=tool)
    assert described.status == 0, described.errors[-3000:]
    assert facts["teacher"] in described.output and facts["tokenizer"] in described.output
    flags = [] if cache == "cache_counts" else ["--", *job.flags(PACKED)]
    verified = run(["verify", folder, *flags], script=tool)
    assert verified.status == 0, verified.output[-3000:] + verified.errors[-6000:]
    assert f"{folder}: every record is intact" in verified.output
    if flags:
        assert f"{folder}: recomputed targets match those of " in verified.output


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "in_the_data_cache"])
def test_projection_and_paired_chats(job: OldJob, is_given: bool) -> None:
    """A teacher with another tokenizer: the projection and the aligned tokens of both sides are not made again."""
    cache, projection = job.store("pairs"), job.root / "projection.safetensors"
    given = {"--kd-projection": projection} if is_given else {}
    if not is_given:
        shutil.copyfile(projection, cache / (job.root / "stores" / "projection.name").read_text())
    before = set(cache.iterdir())
    result = job.train({**OTHER_TOKENIZER, **given, "--kd-metrics-file": job.root / "metrics.jsonl"})
    assert_metrics(result, "other_tokenizer")
    assert "tokenizing for 2 tokenizers, once" not in result.output
    assert "building the projection" not in result.output
    assert set(cache.iterdir()) == before
