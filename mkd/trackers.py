"""Where metrics go beside console and file: TensorBoard and Weights & Biases by Megatron's own writers, and MLflow."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from mkd.config import KDConfig
from mkd.errors import MkdConfigError

PREFIX = "kd/"
"""Beginning of the names of all that mkd writes, beside what Megatron writes under its own."""


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

    def __init__(self, kd: KDConfig, name: str | None) -> None:
        """Start the run.

        Raises:
            MkdConfigError: MLflow refuses, or does not answer.
        """
        import mlflow

        self._mlflow = mlflow
        try:
            if kd.mlflow_uri is not None:
                mlflow.set_tracking_uri(kd.mlflow_uri)
            mlflow.set_experiment(kd.mlflow_experiment)
            mlflow.start_run(run_name=name)
            mlflow.log_params({PREFIX + key: value for key, value in asdict(kd).items() if value is not None})
        except Exception as error:  # whatever the server or its client says
            raise MkdConfigError(
                f"--kd-mlflow-experiment {kd.mlflow_experiment} cannot be written to ({' '.join(str(error).split())}): "
                "correct it or --kd-mlflow-uri, or leave them out"
            ) from error

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        """See `Tracker`. What a server does not take is told and training goes on: the metrics file has it."""
        try:
            self._mlflow.log_metrics({PREFIX + name: value for name, value in values.items()}, step=iteration)
        except Exception as error:
            print(f"mkd: MLflow has not taken iteration {iteration}: {' '.join(str(error).split())}", flush=True)


def trackers_of(args: Namespace, kd: KDConfig) -> list[Tracker]:
    """What was asked for, on the rank that writes.

    Raises:
        MkdConfigError: see `MLflow`.
    """
    trackers: list[Tracker] = []
    if (writer := get_tensorboard_writer()) is not None:
        trackers.append(TensorBoard(writer))
    if (wandb := get_wandb_writer()) is not None:
        trackers.append(WeightsAndBiases(wandb))
    if kd.mlflow_experiment is not None:
        trackers.append(MLflow(kd, None if args.save is None else Path(args.save).name))
    return trackers
