"""mkd/trackers.py: what trackers are given, and that what is asked for exists before work starts."""

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from mkd import flag_checks, trackers
from mkd.config import KDConfig
from mkd.errors import MkdConfigError
from mkd.flag_checks import check_trackers


def kd(**changes: Any) -> KDConfig:
    return KDConfig(**{"teacher_hf": ["T"], "ratio": 0.5, **changes})


class FakeMLflow(ModuleType):
    """Keeps what it is called with."""

    def __init__(self, fails: str | None = None) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, *args, kwargs))
            if name == self.fails:
                raise ConnectionError("no\nanswer")

        return call


def test_tensorboard_and_wandb_get_prefixed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    wandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    monkeypatch.setattr(trackers, "get_tensorboard_writer", lambda: SummaryWriter(str(tmp_path)))
    monkeypatch.setattr(trackers, "get_wandb_writer", lambda: wandb)
    for tracker in trackers.trackers_of(Namespace(save=None), kd()):
        tracker.write({"kd": -0.5, "valid_ce": 2.0}, 7)
    assert logged == [({"kd/kd": -0.5, "kd/valid_ce": 2.0}, 7)]
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert seen.Tags()["scalars"] == ["kd/kd", "kd/valid_ce"]
    assert [(event.step, event.value) for event in seen.Scalars("kd/kd")] == [(7, -0.5)]


@pytest.fixture
def no_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(trackers, "get_wandb_writer", lambda: None)


def test_mlflow(monkeypatch: pytest.MonkeyPatch, no_writers: None) -> None:
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = kd(mlflow_experiment="E", mlflow_uri="file:x")
    (tracker,) = trackers.trackers_of(Namespace(save="runs/1b"), config)
    tracker.write({"ce": 1.0}, 3)
    assert mlflow.calls[:3] == [
        ("set_tracking_uri", "file:x", {}),
        ("set_experiment", "E", {}),
        ("start_run", {"run_name": "1b"}),
    ]
    assert mlflow.calls[3][1]["kd/ratio"] == 0.5
    assert mlflow.calls[4] == ("log_metrics", {"kd/ce": 1.0}, {"step": 3})
    assert trackers.trackers_of(Namespace(save=None), kd()) == []


def test_a_server_that_does_not_answer_is_a_users_error(monkeypatch: pytest.MonkeyPatch, no_writers: None) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow(fails="set_experiment"))
    with pytest.raises(MkdConfigError, match="--kd-mlflow-experiment E cannot be written to \\(no answer\\)"):
        trackers.trackers_of(Namespace(save=None), kd(mlflow_experiment="E"))


def test_training_goes_on_when_a_server_stops_answering(
    monkeypatch: pytest.MonkeyPatch, no_writers: None, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow(fails="log_metrics"))
    (tracker,) = trackers.trackers_of(Namespace(save=None), kd(mlflow_experiment="E"))
    tracker.write({"ce": 1.0}, 3)
    assert capsys.readouterr().out == "mkd: MLflow has not taken iteration 3: no answer\n"


def arguments(**changes: Any) -> Namespace:
    given = dict(tensorboard_dir=None, wandb_project="", wandb_exp_name="", wandb_save_dir="", save=None)
    return Namespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("flag", "args", "config"),
    [
        ("--tensorboard-dir is T, but the package tensorboard", arguments(tensorboard_dir="T"), {}),
        ("--wandb-project is W, but the package wandb", arguments(wandb_project="W"), {}),
        ("--kd-mlflow-experiment is E, but the package mlflow", arguments(), {"mlflow_experiment": "E"}),
    ],
)
def test_a_tracker_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, flag: str, args: Namespace, config: dict
) -> None:
    monkeypatch.setattr(flag_checks, "find_spec", lambda name: None)
    with pytest.raises(MkdConfigError, match=flag):
        check_trackers(args, kd(**config))
    check_trackers(arguments(), kd())


def test_what_wandb_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flag_checks, "find_spec", lambda name: name)
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
    ],
)
def test_flags_that_say_nothing(changes: dict, message: str) -> None:
    with pytest.raises(MkdConfigError, match=message):
        kd(**changes)


def test_compares_at_its_interval() -> None:
    assert [kd(compare_interval=3).compares(i) for i in range(6)] == [False, False, True, False, False, True]
    assert not kd().compares(2)
