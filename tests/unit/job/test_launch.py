"""mkd/job/launch.py: the teacher of a job is closed at its end, whatever ends it."""

from types import SimpleNamespace
from typing import Any

import pytest

from mkd.errors import MkdCheckpointError
from mkd.job import launch
from mkd.report.start_times import StartTimes
from mkd.teacher.ensemble import TeacherEnsemble


class Closable:
    """A teacher of which only the end matters."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def fail(*given: Any, **named: Any) -> None:
    raise MkdCheckpointError("the teacher's loss is not finite")


def test_a_teacher_that_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("initialize_megatron", "set_iterations", "resolve_checkpoint"):
        monkeypatch.setattr(launch, name, lambda *given: None)
    monkeypatch.setattr(launch.Groups, "from_megatron", lambda: None)
    monkeypatch.setattr(launch, "check_teacher_quality", fail)
    teacher = Closable()
    job = SimpleNamespace(
        args=None,
        kd=None,
        state=None,
        resume_point=None,
        teacher=SimpleNamespace(source=None),
        metrics=lambda: None,
        data=SimpleNamespace(sets=lambda: [None, None, None]),
        build_teacher=lambda groups: teacher,
        forward_step=lambda groups: None,
    )
    with pytest.raises(MkdCheckpointError, match="not finite"):
        launch.build(job, StartTimes())
    assert teacher.closed == 1


def test_prompts_that_a_check_has_read_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have a million, which are rendered for the student and for each teacher with another tokenizer."""
    for name in ("initialize_megatron", "set_iterations", "resolve_checkpoint", "write_run_record"):
        monkeypatch.setattr(launch, name, lambda *given: None)
    monkeypatch.setattr(launch.Groups, "from_megatron", lambda: None)
    monkeypatch.setattr(launch, "TeacherThenStudent", lambda **given: SimpleNamespace(**given))
    written = object()
    job = SimpleNamespace(
        args=SimpleNamespace(rank=1),
        kd=None,
        resume_point=None,
        teacher=SimpleNamespace(source=None),
        true_vocab=9,
        state=None,
        on_policy=written,
        metrics=lambda: None,
        data=SimpleNamespace(sets=lambda: [None, None, None], length_multiple=1),
        build_teacher=lambda groups: None,
        forward_step=lambda groups: None,
        pair_layers=lambda groups, teacher: None,
    )
    assert launch.build(job, StartTimes()).schedule.on_policy is written


@pytest.mark.parametrize("end", [fail, lambda *given, **named: None])
def test_all_teachers_of_a_training_are_closed(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    for name in ("destroy_rerun_state_machine", "best_checkpoint", "prepare_saving", "install", "Hooks", "provider_of"):
        monkeypatch.setattr(launch, name, lambda *given, **named: None)
    stop = SimpleNamespace(received=None, status=0)
    monkeypatch.setattr(launch, "StopSignals", lambda *given, **named: SimpleNamespace(listen=lambda: stop))
    monkeypatch.setattr(launch, "pretrain_cfg_container_from_args", lambda *given: None)
    monkeypatch.setattr(launch, "pretrain", end)
    teachers = [Closable(), Closable()]
    schedule = SimpleNamespace(teacher=TeacherEnsemble(tuple(teachers), weights=(0.5, 0.5)))
    parts = launch.TrainingParts([], SimpleNamespace(finite=None), schedule, None, StartTimes())
    args = SimpleNamespace(exit_signal=None, save=None, override_opt_param_scheduler=False)
    job = SimpleNamespace(args=args, kd=None, state=None, student_config=None, samples=None, tasks=None)
    if end is fail:
        with pytest.raises(MkdCheckpointError):
            launch.train(job, parts)
    else:
        launch.train(job, parts)
    assert [teacher.closed for teacher in teachers] == [1, 1]


def test_teachers_after_one_that_cannot_be_closed_are_closed() -> None:
    teachers = [Closable(), SimpleNamespace(close=fail), Closable()]
    with pytest.raises(MkdCheckpointError, match="not finite"):
        TeacherEnsemble(tuple(teachers), weights=(0.3, 0.3, 0.4)).close()
    assert (teachers[0].closed, teachers[2].closed) == (1, 1)
