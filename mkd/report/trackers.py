"""Trackers of metrics: TensorBoard and Weights & Biases with Megatron's writers, and MLflow.

A job that restarts in its --save folder continues the runs whose ids are stored there.
"""

import json
import os
import re
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from megatron.training import global_vars
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError, MkdNodeError
from mkd.report.samples import Sample, samples_as_markdown
from mkd.utils.atomic_files import replacing
from mkd.utils.json_files import read_json
from mkd.utils.logging import EVERY_RANK, logger

_USER = re.compile(r"//[^/]*@")
"""User and password in a URI, which are not stored."""
PREFIX = "kd/"
"""Prefix of the names of mkd's metrics; Megatron writes its own without it."""
FILE = "trackers.json"
"""File in --save with the ids of the runs."""


class RunIds:
    """Ids of the runs of a --save folder, by tracker and project."""

    def __init__(self, save: str | None) -> None:
        """Args:
        save: the folder; None stores nothing.

        Raises:
            MkdConfigError: the file of ids is damaged.
        """
        self._file = None if save is None else Path(save) / FILE
        self._ids: dict[str, str] = {}
        if self._file is not None and self._file.is_file():
            try:
                self._ids = dict(read_json(self._file))
                if not all(isinstance(run, str) for run in self._ids.values()):
                    raise ValueError("an id that is not text")
            except (ValueError, TypeError) as error:
                raise MkdConfigError(f"{self._file} is damaged ({error}): remove it to start new runs") from error

    def __getitem__(self, key: str) -> str | None:
        return self._ids.get(key)

    def __setitem__(self, key: str, run: str) -> None:
        if self[key] == run or self._file is None:
            return
        self._ids[key] = run
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as out:
            json.dump(self._ids, out)


class Tracker(Protocol):
    """Writes the metrics of an iteration."""

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """Write values by name, without the prefix."""
        ...

    def write_samples(self, samples: list[Sample], iteration: int) -> None:
        """Write texts of the student."""
        ...


class TensorBoard:
    """Scalars in Megatron's --tensorboard-dir."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(PREFIX + name, value, iteration)
        self._writer.flush()

    def write_samples(self, samples: list[Sample], iteration: int) -> None:
        """See `Tracker`."""
        self._writer.add_text(f"{PREFIX}samples", samples_as_markdown(samples), iteration)
        self._writer.flush()


class LenientWriter:
    """A TensorBoard writer whose first failure, such as a full disk, is logged; later calls do nothing.

    Training continues: the metrics file has the values. Megatron uses it too.
    """

    def __init__(self, writer: Any, folder: str) -> None:
        self._writer, self._folder, self._has_failed = writer, folder, False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._writer, name)
        return (lambda *args, **kwargs: self._call(value, *args, **kwargs)) if callable(value) else value

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if self._has_failed:
            return None
        try:
            return method(*args, **kwargs)
        except Exception as error:  # OSError, or what the writer's thread makes of it
            self._has_failed = True
            logger.warning(
                f"--tensorboard-dir {self._folder} cannot be written ({' '.join(str(error).split())}): nothing more is "
                "written there",
                extra=EVERY_RANK,
            )
            return None


class WeightsAndBiases:
    """The run of Megatron's --wandb-project."""

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`."""
        self._wandb.log({PREFIX + name: value for name, value in values.items()}, iteration)

    def write_samples(self, samples: list[Sample], iteration: int) -> None:
        """See `Tracker`."""
        rows = [[iteration, sample.prompt, sample.text] for sample in samples]
        table = self._wandb.Table(columns=["iteration", "prompt", "text"], data=rows)
        self._wandb.log({f"{PREFIX}samples": table}, iteration)


class MLflow:
    """A run of --kd-mlflow-experiment; MLFLOW_RUN_ID continues an existing run, as usual in MLflow."""

    def __init__(self, kd: KDConfig, name: str | None, runs: RunIds) -> None:
        """Start the run, or continue the one of this --save folder.

        Raises:
            MkdConfigError: MLflow fails to start the run.
        """
        import mlflow

        self._mlflow = mlflow
        uri = _USER.sub("//", kd.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))
        key = f"MLflow {uri} {kd.mlflow_experiment}"
        try:
            if kd.mlflow_uri is not None:
                mlflow.set_tracking_uri(kd.mlflow_uri)
            mlflow.set_experiment(kd.mlflow_experiment)
            run = mlflow.start_run(os.environ.get("MLFLOW_RUN_ID") or runs[key], run_name=name)
            params = {PREFIX + key: value for key, value in asdict(kd).items() if value is not None}
            # Parameters of a run cannot be changed.
            mlflow.log_params({key: value for key, value in params.items() if key not in run.data.params})
            runs[key] = run.info.run_id
        except Exception as error:  # any error of the server or its client
            raise MkdConfigError(
                f"--kd-mlflow-experiment {kd.mlflow_experiment} cannot be written to ({' '.join(str(error).split())}): "
                f"correct it or --kd-mlflow-uri, or leave them out; without {FILE} in --save a new run starts"
            ) from error

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`. A failed write is logged, and training continues: the metrics file has the values."""
        numbers = {PREFIX + name: value for name, value in values.items()}
        self._log(iteration, lambda: self._mlflow.log_metrics(numbers, step=iteration))

    def write_samples(self, samples: list[Sample], iteration: int) -> None:
        """See `Tracker`: a text artifact per evaluation."""
        text = samples_as_markdown(samples) + "\n"
        self._log(iteration, lambda: self._mlflow.log_text(text, f"samples/iter_{iteration:07d}.md"))

    def _log(self, iteration: int, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            message = f"MLflow did not accept iteration {iteration}: {' '.join(str(error).split())}"
            logger.warning(message, extra=EVERY_RANK)


def start_trackers(args: Namespace, kd: KDConfig) -> list[Tracker]:
    """Start the trackers of the command line, on the rank that writes; Megatron's own writers too.

    Raises:
        MkdConfigError: a tracker fails to start.
    """
    trackers: list[Tracker] = []
    runs = RunIds(args.save)
    _start_tensorboard(args)
    if args.wandb_project:
        _start_wandb(args, runs)
    if (writer := get_tensorboard_writer()) is not None:
        trackers.append(TensorBoard(writer))
    if (wandb := get_wandb_writer()) is not None:
        trackers.append(WeightsAndBiases(wandb))
    if kd.mlflow_experiment is not None:
        trackers.append(MLflow(kd, None if args.save is None else Path(args.save).name, runs))
    return trackers


def _start_tensorboard(args: Namespace) -> None:
    print_traceback = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        # The writer's next call raises the exception of TensorBoard's thread again, and `LenientWriter` reports it.
        if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
            print_traceback(failure)

    if args.tensorboard_dir:
        threading.excepthook = report
    try:
        global_vars._set_tensorboard_writer(args)
    except OSError as error:
        raise MkdNodeError(
            f"--tensorboard-dir {args.tensorboard_dir} cannot be written ({error}): free space, or give another folder"
        ) from error
    if (writer := get_tensorboard_writer()) is not None:
        global_vars._GLOBAL_TENSORBOARD_WRITER = LenientWriter(writer, args.tensorboard_dir)


def _start_wandb(args: Namespace, runs: RunIds) -> None:
    """Megatron passes no run id; Weights & Biases reads it from the environment."""
    key = f"wandb {args.wandb_entity or ''} {args.wandb_project} {args.wandb_exp_name}"
    run = os.environ.setdefault("WANDB_RUN_ID", runs[key] or uuid4().hex[:12])
    os.environ.setdefault("WANDB_RESUME", "allow")
    try:
        global_vars._set_wandb_writer(args)
    except Exception as error:  # any error of the server or its client
        raise MkdConfigError(
            f"--wandb-project {args.wandb_project} cannot be written to ({' '.join(str(error).split())}): correct it, "
            "set WANDB_MODE=offline, or leave it out"
        ) from error
    runs[key] = run
