"""mkd/report/trackers.py: values passed to trackers, and failures before training starts."""

import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.parts import check_trackers
from mkd.errors import MkdConfigError, MkdNodeError
from mkd.report import trackers
from mkd.report.samples import Sample


def arguments(**changes: Any) -> Namespace:
    given = dict(tensorboard_dir=None, wandb_project="", wandb_exp_name="", wandb_save_dir="", save=None)
    return Namespace(**{**given, "wandb_entity": None, **changes})


def kd(**changes: Any) -> KDConfig:
    return KDConfig(**{"teacher_hf": ["T"], "ratio": 0.5, **changes})


class FakeMLflow(ModuleType):
    """Records its calls; a new run is run-7."""

    def __init__(self, fails: str | None = None, had: dict[str, str] | None = None) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple] = []
        self.fails, self.had = fails, had or {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, kwargs))
            if name == self.fails:
                raise ConnectionError("no\nanswer")
            run = args[0] if args and args[0] else "run-7"
            return SimpleNamespace(info=SimpleNamespace(run_id=run), data=SimpleNamespace(params=self.had))

        return call


def test_tensorboard_and_wandb_get_prefixed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    wandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)), Table=dict)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    monkeypatch.setattr(trackers, "get_wandb_writer", lambda: wandb)
    given = arguments(tensorboard_dir=str(tmp_path), tensorboard_queue_size=1, rank=0, world_size=1)
    for tracker in trackers.start_trackers(given, kd()):
        tracker.write({"kd": -0.5, "valid_ce": 2.0}, 7)
        tracker.write_samples([Sample("a", "b\nc", 2, ended=True)], 7)
    table = {"columns": ["iteration", "prompt", "text"], "data": [[7, "a", "b\nc"]]}
    assert logged == [({"kd/kd": -0.5, "kd/valid_ce": 2.0}, 7), ({"kd/samples": table}, 7)]
    seen = EventAccumulator(str(tmp_path)).Reload()
    (text,) = seen.Tensors("kd/samples/text_summary")
    assert text.step == 7 and text.tensor_proto.string_val[0].decode() == "**1**\n\n    a\n\n=>\n\n    b\n    c"
    assert seen.Tags()["scalars"] == ["kd/kd", "kd/valid_ce"]
    assert [(event.step, event.value) for event in seen.Scalars("kd/kd")] == [(7, -0.5)]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = kd(mlflow_experiment="E", mlflow_uri="file:x")
    (tracker,) = trackers.start_trackers(arguments(save=str(tmp_path / "1b")), config)
    tracker.write({"ce": 1.0}, 3)
    assert mlflow.calls[:3] == [
        ("set_tracking_uri", "file:x", {}),
        ("set_experiment", "E", {}),
        ("start_run", None, {"run_name": "1b"}),
    ]
    assert mlflow.calls[3][1]["kd/ratio"] == 0.5
    assert mlflow.calls[4] == ("log_metrics", {"kd/ce": 1.0}, {"step": 3})
    assert trackers.start_trackers(arguments(), kd()) == []


def test_restarted_job_continues_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For MLflow and Weights & Biases; another experiment has a separate run."""
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "restored after the test")
    begun = []
    monkeypatch.setattr(global_vars, "_set_wandb_writer", lambda args: begun.append(os.environ["WANDB_RUN_ID"]))

    def start(experiment: str, had: dict[str, str]) -> list[tuple]:
        for name in ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
            monkeypatch.delenv(name, raising=False)
        mlflow = FakeMLflow(had=had)
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        args = arguments(save=str(tmp_path / "save"), wandb_project="W", wandb_exp_name=experiment)
        trackers.start_trackers(args, kd(mlflow_experiment=experiment))
        assert os.environ["WANDB_RESUME"] == "allow"
        return mlflow.calls[1:]

    assert start("E", {})[0] == ("start_run", None, {"run_name": "save"})
    again = start("E", {"kd/ratio": "0.9"})  # of the attempt before
    assert again[0] == ("start_run", "run-7", {"run_name": "save"})
    assert "kd/ratio" not in again[1][1] and again[1][1]["kd/loss"] == "forward_kl"
    assert start("F", {})[0][1] is None
    assert begun[0] == begun[1] != begun[2]
    (tmp_path / "save" / trackers.FILE).write_text("{")
    with pytest.raises(MkdConfigError, match=f"{trackers.FILE} is damaged"):
        start("E", {})


def test_unreachable_server_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow(fails="set_experiment"))
    with pytest.raises(MkdConfigError, match="--kd-mlflow-experiment E cannot be written to \\(no answer\\)"):
        trackers.start_trackers(arguments(), kd(mlflow_experiment="E"))


def test_training_continues_when_a_server_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow(fails="log_metrics"))
    (tracker,) = trackers.start_trackers(arguments(), kd(mlflow_experiment="E"))
    tracker.write({"ce": 1.0}, 3)
    assert capsys.readouterr().out == "mkd: MLflow did not accept iteration 3: no answer\n"


@pytest.mark.parametrize(
    ("flag", "args", "config"),
    [
        ("--tensorboard-dir is T, but the package tensorboard", arguments(tensorboard_dir="T"), {}),
        ("--wandb-project is W, but the package wandb", arguments(wandb_project="W"), {}),
        ("--kd-mlflow-experiment is E, but the package mlflow", arguments(), {"mlflow_experiment": "E"}),
    ],
)
def test_tracker_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, flag: str, args: Namespace, config: dict
) -> None:
    monkeypatch.setattr("mkd.config.megatron.checks.parts.find_spec", lambda name: None)
    with pytest.raises(MkdConfigError, match=flag):
        check_trackers(args, kd(**config))
    check_trackers(arguments(), kd())


def test_wandb_failure_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "x")
    monkeypatch.setenv("WANDB_RESUME", "allow")

    def refuse(args: Namespace) -> None:
        raise RuntimeError("no\nkey")

    monkeypatch.setattr(global_vars, "_set_wandb_writer", refuse)
    with pytest.raises(MkdConfigError, match="--wandb-project W cannot be written to \\(no key\\)"):
        trackers.start_trackers(arguments(wandb_project="W"), kd())


def test_wandb_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkd.config.megatron.checks.parts.find_spec", lambda name: name)
    for missing, args in {
        "--wandb-exp-name": arguments(wandb_project="W"),
        "--wandb-save-dir": arguments(wandb_project="W", wandb_exp_name="x"),
    }.items():
        with pytest.raises(MkdConfigError, match=missing):
            check_trackers(args, kd())
    check_trackers(arguments(wandb_project="W", wandb_exp_name="x", save="S"), kd())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compare_interval": 0}, "--kd-compare-interval is 0; it must be at least 1"),
        ({"compare_interval": 5, "ratio": 0.0}, "--kd-compare-interval is 5, but at R = 0"),
        ({"mlflow_uri": "U"}, "--kd-mlflow-uri is U, but nothing is written to MLflow"),
        ({"mlflow_uri": "https://me:secret@host", "mlflow_experiment": "E"}, "^--kd-mlflow-uri has a password: "),
    ],
)
def test_flags_without_effect(changes: dict, message: str) -> None:
    with pytest.raises(MkdConfigError, match=message):
        kd(**changes)


def test_compare_interval() -> None:
    assert [kd(compare_interval=3).compares(i) for i in range(6)] == [False, False, True, False, False, True]
    assert not kd().compares(2)


def test_a_full_disk_under_tensorboard(capsys: pytest.CaptureFixture) -> None:
    """The first failure is one line, and training continues."""

    class Full:
        log_dir = "T"

        def add_scalar(self, *args: Any) -> None:
            raise OSError(28, "No space left on device")

        flush = add_scalar

    writer = trackers.LenientWriter(Full(), "T")
    for iteration in (1, 2):
        trackers.TensorBoard(writer).write({"ce": 1.0}, iteration)
    assert writer.log_dir == "T"
    (line,) = capsys.readouterr().out.splitlines()
    assert "--tensorboard-dir T cannot be written ([Errno 28] No space left on device)" in line


def test_tensorboard_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    given = arguments(tensorboard_dir=str(tmp_path / "file" / "T"), tensorboard_queue_size=1, rank=0, world_size=1)
    with pytest.raises(MkdNodeError, match=r"--tensorboard-dir .*file/T cannot be written"):
        trackers.start_trackers(given, kd())


def test_passwords_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@host/x")
    trackers.start_trackers(arguments(save=str(tmp_path)), kd(mlflow_experiment="E"))
    assert (tmp_path / trackers.FILE).read_text() == '{"MLflow https://host/x E": "run-7"}'


def test_ids_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / trackers.FILE).write_text('{"a": 5}')
    with pytest.raises(MkdConfigError, match="an id that is not text"):
        trackers.RunIds(str(tmp_path))
