"""A teacher service as the teacher of a job: what is refused before anything is loaded."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError, MkdTeacherError
from mkd.job import served_teacher
from mkd.job.served_teacher import ServedSource, ServedTeacherSpec
from mkd.teacher.service.addresses import ServiceAddress
from tests.unit.teacher.test_service import FACTS

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
        ServedTeacherSpec.of(source, job, config)
    assert [word for word in words if word not in str(error.value)] == []


def test_addresses_of_different_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FACTS, replace(FACTS, fingerprint="b" * 32)]
    monkeypatch.setattr(served_teacher, "ask_facts", lambda *_: found)
    with pytest.raises(MkdTeacherError, match=r"tcp://127.0.0.1:2 is b+ .* services of one teacher"):
        ServedSource.ask(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], 1.0)


def test_other_machines_need_a_secret() -> None:
    with pytest.raises(MkdConfigError, match=r"--kd-teacher-url tcp://node:1 .* MKD_TEACHER_TOKEN"):
        ServedSource.ask(["tcp://node:1"], 1.0)
