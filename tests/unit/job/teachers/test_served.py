"""A teacher service as the teacher of a job: what is refused before anything is loaded."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mkd.checkpoint.source import EnsembleSource
from mkd.checkpoint.tokenizer_hash import tokenizer_hash
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError, MkdTeacherError
from mkd.job.teachers import served
from mkd.job.teachers.served import ServedSource, ServedTeacherSpec
from mkd.teacher.service.addresses import ServiceAddress
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.targets import TopKTargets
from tests.support.e2e.small_job import make_tokenizer, save_tokenizer
from tests.unit.teacher.test_service import FACTS

URLS = [f"tcp://127.0.0.1:{port}" for port in (1, 2, 3)]
SOURCE = ServedSource((ServiceAddress("127.0.0.1", 5757),), None, FACTS)


@pytest.mark.parametrize(
    ("facts", "args", "kd", "words"),
    [
        ({"packed": False}, {}, {"packing": "best_fit"}, ["--kd-packing is best_fit", "mkd serve-teacher"]),
        ({}, {"seq_length": 32, "micro_batch_size": 1}, {}, ["--seq-length 32", "16 positions"]),
        ({}, {"micro_batch_size": 5}, {}, ["a microbatch of 80 tokens", "64"]),
        ({"row_multiple": 6}, {}, {}, ["--seq-length gives multiples of 16", "6"]),
        ({"segment_multiple": 32}, {}, {"packing": "best_fit"}, ["--kd-packing-multiple gives multiples of 16", "32"]),
    ],
)
def test_rows_that_do_not_fit(
    facts: dict[str, Any], args: dict[str, Any], kd: dict[str, Any], words: list[str]
) -> None:
    source = replace(SOURCE, facts=replace(FACTS, **facts))
    job = Namespace(**{"seq_length": 16, "micro_batch_size": 2, **args})
    config = KDConfig(teacher_url=["tcp://127.0.0.1:5757"], ratio=0.5, **kd)
    with pytest.raises(MkdConfigError) as error:
        ServedTeacherSpec.of(source, job, config, 50)
    assert [word for word in words if word not in str(error.value)] == []


def test_targets_larger_than_hidden_states() -> None:
    kd = dict(teacher_url=["tcp://127.0.0.1:5757"], ratio=0.5, teacher_targets="top_k", temperature=2.0)
    source, job = replace(SOURCE, facts=replace(FACTS, width=16)), Namespace(seq_length=16, micro_batch_size=2)
    assert ServedTeacherSpec.of(source, job, KDConfig(top_k=4, **kd), 49).targets == TopKTargets(4, 49, 2.0)
    with pytest.raises(MkdConfigError, match=r"has 64 bytes per token with --kd-top-k 5.* 64: .* a smaller number"):
        ServedTeacherSpec.of(source, job, KDConfig(top_k=5, **kd), 49)
    renormalized = KDConfig(top_k=4, top_k_tail="renormalize", **kd)
    assert ServedTeacherSpec.of(source, job, renormalized, 49).targets == TopKTargets(4, 49, 1.0)


def test_addresses_of_different_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FACTS, replace(FACTS, fingerprint="b" * 32)]
    monkeypatch.setattr(served, "request_facts", lambda *_: found)
    with pytest.raises(MkdTeacherError, match=r"tcp://127.0.0.1:2 is b+ .* services of one teacher"):
        ServedSource.find(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], 1.0)


OTHER = replace(FACTS, fingerprint="b" * 32, tokenizer="t")


@pytest.mark.parametrize(
    ("found", "flags", "addresses"),
    [
        ([FACTS, OTHER, FACTS], {"teacher_weights": [0.5, 0.5]}, [[1, 3], [2]]),
        ([FACTS, OTHER, OTHER], {"teachers_mode": "select"}, [[1], [2, 3]]),
        ([FACTS, FACTS, FACTS], {}, [[1, 2, 3]]),
    ],
)
def test_teachers_of_a_job(
    monkeypatch: pytest.MonkeyPatch, found: list[TeacherFacts], flags: dict[str, Any], addresses: list[list[int]]
) -> None:
    monkeypatch.setattr(served, "request_facts", lambda *_: found)
    source = ServedSource.of_job(KDConfig(teacher_url=URLS, ratio=0.5, **flags), 1.0)
    teachers = source.sources if isinstance(source, EnsembleSource) else [source]
    assert [[address.port for address in teacher.addresses] for teacher in teachers] == addresses


@pytest.mark.parametrize(
    ("found", "flags", "words"),
    [
        ([FACTS, OTHER, FACTS], {"teacher_weights": [1.0, 1.0, 1.0]}, "services of 2 teachers.*3 weights"),
        ([FACTS, FACTS, FACTS], {"teachers_mode": "select"}, "services of 1 teachers.*--kd-teachers-mode select"),
        ([OTHER] * 3, {"xtoken_loss": "gold"}, "--kd-teacher-tokenizer {} is not the tokenizer"),
    ],
)
def test_teachers_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: list[TeacherFacts], flags: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(served, "request_facts", lambda *_: found)
    if "xtoken_loss" in flags:
        flags = {**flags, "teacher_tokenizer": [str(tmp_path)]}
    with pytest.raises(MkdConfigError, match=words.format(tmp_path)):
        ServedSource.of_job(KDConfig(teacher_url=URLS, ratio=0.5, **flags), 1.0)


def test_folder_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(), tmp_path)
    facts = replace(FACTS, tokenizer=tokenizer_hash(tmp_path, ""))
    monkeypatch.setattr(served, "request_facts", lambda *_: [facts] * 3)
    kd = KDConfig(teacher_url=URLS, ratio=0.5, xtoken_loss="gold", teacher_tokenizer=[str(tmp_path)])
    assert ServedSource.of_job(kd, 1.0).tokenizer_folder == tmp_path


def test_other_machines_need_a_secret() -> None:
    with pytest.raises(MkdConfigError, match=r"--kd-teacher-url tcp://node:1 .* MKD_TEACHER_TOKEN"):
        ServedSource.find(["tcp://node:1"], 1.0)
