"""Where metrics go beside console and file: TensorBoard and Weights & Biases by Megatron's own writers, and MLflow.

A job that starts again in its --save folder goes on in the runs that are named there.
"""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from megatron.training import global_vars
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError
from mkd.utils.atomic_files import replacing
from mkd.utils.logging import EVERY_RANK, logger

PREFIX = "kd/"
"""Beginning of the names of all that mkd writes, beside what Megatron writes under its own."""
FILE = "trackers.json"
"""In --save: names the runs."""


class Runs:
    """The runs of a folder: what they belong to, such as a project -> their id."""

    def __init__(self, save: str | None) -> None:
        """Args:
        save: the folder; None: nothing is kept.

        Raises:
            MkdConfigError: its file is damaged.
        """
        self._file = None if save is None else Path(save) / FILE
        self._ids: dict[str, str] = {}
        if self._file is not None and self._file.is_file():
            try:
                self._ids = dict(json.loads(self._file.read_text()))
            except (ValueError, TypeError) as error:
                raise MkdConfigError(f"{self._file} is damaged ({error}): remove it to begin new runs") from error

    def __getitem__(self, what: str) -> str | None:
        return self._ids.get(what)

    def __setitem__(self, what: str, run: str) -> None:
        if self[what] == run or self._file is None:
            return
        self._ids[what] = run
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as out:
            json.dump(self._ids, out)


class Tracker(Protocol):
    """Takes the metrics of an iteration."""

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """Names and values; the names have no prefix yet."""
        ...


class TensorBoard:
    """Scalars of Megatron's --tensorboard-dir."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(PREFIX + name, value, iteration)
        self._writer.flush()


class WeightsAndBiases:
    """The run of Megatron's --wandb-project."""

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`."""
        self._wandb.log({PREFIX + name: value for name, value in values.items()}, iteration)


class MLflow:
    """A run of --kd-mlflow-experiment; MLFLOW_RUN_ID continues one that exists, as everywhere in MLflow."""

    def __init__(self, kd: KDConfig, name: str | None, runs: Runs) -> None:
        """Start the run, or go on in the one of this folder.

        Raises:
            MkdConfigError: MLflow refuses, or does not answer.
        """
        import mlflow

        self._mlflow = mlflow
        what = f"MLflow {kd.mlflow_uri or os.environ.get('MLFLOW_TRACKING_URI', '')} {kd.mlflow_experiment}"
        try:
            if kd.mlflow_uri is not None:
                mlflow.set_tracking_uri(kd.mlflow_uri)
            mlflow.set_experiment(kd.mlflow_experiment)
            run = mlflow.start_run(os.environ.get("MLFLOW_RUN_ID") or runs[what], run_name=name)
            params = {PREFIX + key: value for key, value in asdict(kd).items() if value is not None}
            # A parameter of a run cannot be changed.
            mlflow.log_params({key: value for key, value in params.items() if key not in run.data.params})
            runs[what] = run.info.run_id
        except Exception as error:  # whatever the server or its client says
            raise MkdConfigError(
                f"--kd-mlflow-experiment {kd.mlflow_experiment} cannot be written to ({' '.join(str(error).split())}): "
                f"correct it or --kd-mlflow-uri, or leave them out; without {FILE} in --save a new run begins"
            ) from error

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`. What a server does not take is told and training goes on: the metrics file has it."""
        try:
            self._mlflow.log_metrics({PREFIX + name: value for name, value in values.items()}, step=iteration)
        except Exception as error:
            message = f"MLflow has not taken iteration {iteration}: {' '.join(str(error).split())}"
            logger.warning(message, extra=EVERY_RANK)


def start_trackers(args: Namespace, kd: KDConfig) -> list[Tracker]:
    """The trackers asked for, on the rank that writes; Megatron's own writers too, which `finish` leaves out.

    Raises:
        MkdConfigError: a tracker refuses, or does not answer.
    """
    trackers: list[Tracker] = []
    runs = Runs(args.save)
    global_vars._set_tensorboard_writer(args)
    if args.wandb_project:
        _start_wandb(args, runs)
    if (writer := get_tensorboard_writer()) is not None:
        trackers.append(TensorBoard(writer))
    if (wandb := get_wandb_writer()) is not None:
        trackers.append(WeightsAndBiases(wandb))
    if kd.mlflow_experiment is not None:
        trackers.append(MLflow(kd, None if args.save is None else Path(args.save).name, runs))
    return trackers


def _start_wandb(args: Namespace, runs: Runs) -> None:
    """Megatron names no run; Weights & Biases takes the name from the environment."""
    what = f"wandb {args.wandb_entity or ''} {args.wandb_project} {args.wandb_exp_name}"
    run = os.environ.setdefault("WANDB_RUN_ID", runs[what] or uuid4().hex[:12])
    os.environ.setdefault("WANDB_RESUME", "allow")
    try:
        global_vars._set_wandb_writer(args)
    except Exception as error:  # whatever the server or its client says
        raise MkdConfigError(
            f"--wandb-project {args.wandb_project} cannot be written to ({' '.join(str(error).split())}): correct it, "
            "set WANDB_MODE=offline, or leave it out"
        ) from error
    runs[what] = run
