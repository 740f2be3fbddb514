"""When the teacher runs, and what a step's forward steps receive. Numbers in every layout: tests/dist."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.data.batch import KDBatch
from mkd.train import schedule as module
from mkd.train.schedule import TeacherThenStudent, _per_model_chunk
from mkd.train.step import StepInput
from mkd.train.step_tokens import StepTokens

MICROBATCHES = 3


class Teacher:
    """Returns the numbers of the microbatches as signals, and logs each call."""

    def __init__(self, log: list, runs_before_student: bool = False) -> None:
        self._log, self.runs_before_student = log, runs_before_student

    def prepare(self, batches: Sequence[KDBatch], upcoming: Any) -> list[KDBatch]:
        self._log.append("prepare")
        return list(batches)

    def signals(self, batches: Sequence[KDBatch]) -> list[Any]:
        self._log.append(("teacher", [batch.number for batch in batches]))
        return [f"signal {batch.number}" for batch in batches]

    def __getattr__(self, name: str) -> Any:
        return lambda: {}  # the metrics of the step


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group exists: counts are local, batches are not compared between ranks."""
    monkeypatch.setattr(module, "check_same_batch", lambda *_: None)
    local = SimpleNamespace(of=lambda batches, *_: StepTokens(*torch.full((2,), 4.0 * len(batches))))
    monkeypatch.setattr(module, "StepTokens", local)


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(4)[None]
    return [
        {"tokens": tokens, "labels": tokens, "position_ids": tokens, "loss_mask": torch.ones(1, 4)}
        for _ in range(MICROBATCHES)
    ]


def run(
    log: list,
    teacher: Teacher | None,
    *,
    pp: int = 1,
    is_last_stage: bool = True,
    model_chunks: int = 1,
    evaluating: bool = False,
    iteration: int = 0,
    **options: Any,
) -> list[list[StepInput]]:
    """One step; the inputs that each model chunk's forward steps received."""
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    stages = SimpleNamespace(size=lambda: pp)
    groups = SimpleNamespace(cp=one, dp_cp=one, mp=one, pp=stages, is_last_stage=is_last_stage)
    kd = KDConfig(teacher_hf=["folder"], **({"ratio": 0.5} | options))

    def megatron(*, data_iterator: Any, num_microbatches: int, **_: Any) -> list[dict]:
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        received: list[list[StepInput]] = [[] for _ in iterators]
        for inputs, iterator in zip(received, iterators, strict=True):
            for _ in range(num_microbatches):
                inputs.append(next(iterator))
                log.append(("student", inputs[-1].batch.number))
        seen.extend(received)
        return []

    seen: list[list[StepInput]] = []
    source = iter(samples())
    wrapped: Callable = TeacherThenStudent(kd, groups, teacher, 4, lambda: iteration).around(megatron)
    wrapped(
        data_iterator=[source] + [None] * (model_chunks - 1) if model_chunks > 1 else source,
        num_microbatches=MICROBATCHES,
        forward_only=evaluating,
        micro_batch_size=1,
        seq_length=4,
        model=SimpleNamespace(config=SimpleNamespace(num_moe_experts=None)),
    )
    return seen


def test_samples_that_are_read_before_texts_are_written_count_as_data() -> None:
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(cp=one, dp=one, dp_cp=one, mp=one, pp=one, is_last_stage=True)
    policy: Any = SimpleNamespace(count=lambda *_: 1, write=lambda *_: None)
    schedule = TeacherThenStudent(
        KDConfig(teacher_hf=["folder"], ratio=0.5), groups, Teacher([]), 4, lambda: 0, on_policy=policy
    )

    def slow() -> Iterator[dict[str, torch.Tensor]]:
        for sample in samples():
            time.sleep(0.02)
            yield sample

    schedule.around(lambda **_: [])(
        data_iterator=slow(),
        num_microbatches=MICROBATCHES,
        micro_batch_size=1,
        seq_length=4,
        model=SimpleNamespace(config=SimpleNamespace(num_moe_experts=None)),
    )
    assert schedule.record.data_s >= MICROBATCHES * 0.02


def test_teacher_runs_per_microbatch() -> None:
    log: list = []
    [inputs] = run(log, Teacher(log))
    assert log == ["prepare"] + [event for n in range(MICROBATCHES) for event in (("teacher", [n]), ("student", n))]
    assert [step.signal for step in inputs] == [f"signal {n}" for n in range(MICROBATCHES)]


@pytest.mark.parametrize("options", [{"pp": 2}, {"pp": 1, "first": True}], ids=["pipeline", "own layout or offload"])
def test_teacher_runs_before_the_student(options: dict[str, Any]) -> None:
    log: list = []
    [inputs] = run(log, Teacher(log, runs_before_student=options.pop("first", False)), **options)
    assert log == ["prepare", ("teacher", [0, 1, 2]), *(("student", n) for n in range(MICROBATCHES))]
    assert [step.signal for step in inputs] == [f"signal {n}" for n in range(MICROBATCHES)]


def test_only_the_last_stage_receives_signals() -> None:
    log: list = []
    [inputs] = run(log, Teacher(log), pp=2, is_last_stage=False)
    assert ("teacher", [0, 1, 2]) in log
    assert [step.signal for step in inputs] == [None] * MICROBATCHES


def test_virtual_stages_receive_the_same_inputs() -> None:
    first, second = run([], Teacher([]), pp=2, model_chunks=2)
    assert len(first) == MICROBATCHES
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_inputs_are_dropped_after_the_last_virtual_stage() -> None:
    class Input:
        pass

    made: list[weakref.ref] = []

    def inputs() -> Iterator[Input]:
        for _ in range(20):
            one = Input()
            made.append(weakref.ref(one))
            yield one
            del one

    first, second = _per_model_chunk(inputs(), [None, None])
    for number in range(20):
        next(first)
        if number >= 2:
            next(second)
        assert sum(one() is not None for one in made) <= 3
    assert (len(list(first)), len(list(second))) == (0, 2)


@pytest.mark.parametrize(("evaluating", "runs"), [(False, False), (True, True)])
def test_at_ratio_0_only_evaluations_run_the_teacher(evaluating: bool, runs: bool) -> None:
    log: list = []
    [inputs] = run(log, Teacher(log), ratio=None, ratio_schedule="linear:0:1:10", evaluating=evaluating)
    assert [step.signal is not None for step in inputs] == [runs] * MICROBATCHES
    assert ("prepare" in log) is runs
    assert all(step.objective.tokens is not None for step in inputs)


def test_a_run_without_the_teacher_counts_no_tokens() -> None:
    [inputs] = run([], None, ratio=0.0)
    assert all(step.signal is None and step.objective.tokens is None for step in inputs)


def test_ratio_and_temperature_are_those_of_the_iteration() -> None:
    options = {"ratio": None, "ratio_schedule": "linear:0:1:10", "temperature_schedule": "linear:1:5:8"}
    [inputs] = run([], Teacher([]), iteration=4, **options)
    objective = inputs[0].objective
    assert (objective.ratio, objective.spec.temperature) == (0.4, 3.0)
    assert all(step.objective is objective for step in inputs)
    assert replace(objective, tokens=None).with_kd
