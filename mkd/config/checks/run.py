"""The run: its rows, its length, its adapters, and the results that it keeps."""

import math
import re
from typing import get_args

from mkd.config.kd_fields import KDFields
from mkd.config.values import BestMetric, require_choice
from mkd.errors import MkdConfigError

_PASSWORD = re.compile(r"//[^/]*:[^/]*@")
"""User and password in a URI."""


def check_lengths(kd: KDFields) -> None:
    """Refuse microbatches of different lengths with packed rows."""
    if kd.variable_seq_lengths and kd.packing != "none":
        raise MkdConfigError(
            f"--kd-variable-seq-lengths does not work with --kd-packing {kd.packing}: packed rows have one length"
        )


def check_snapshots_kept(kd: KDFields) -> None:
    """Refuse --kd-save-hf-keep without --kd-save-hf-interval."""
    if kd.save_hf_keep is not None and kd.save_hf_interval is None:
        raise MkdConfigError(
            f"--kd-save-hf-keep is {kd.save_hf_keep}, but no Hugging Face folders are written: give "
            "--kd-save-hf-interval, or leave it out"
        )


def check_keep_best(kd: KDFields) -> None:
    """Refuse --kd-keep-best by an accuracy that is not measured."""
    if kd.keep_best is None:
        return
    require_choice("--kd-keep-best", kd.keep_best, get_args(BestMetric))
    if kd.keep_best == "accuracy" and kd.eval_tasks is None:
        raise MkdConfigError("--kd-keep-best is accuracy, which is measured with --kd-eval-tasks only: give its file")


def check_epochs(kd: KDFields) -> None:
    """Refuse a number of epochs that is not finite and above 0."""
    if kd.epochs is not None and not (math.isfinite(kd.epochs) and kd.epochs > 0.0):
        raise MkdConfigError(f"--kd-epochs is {kd.epochs:g}; it must be a finite number > 0")


def check_lora(kd: KDFields) -> None:
    """Refuse --kd-lora without a student's folder or with another form, and its options without it."""
    if kd.lora is None:
        if kd.lora_modules is not None:
            raise MkdConfigError(
                f"--kd-lora-modules is {' '.join(kd.lora_modules)}, but there are no adapters: give --kd-lora, or "
                "leave it out"
            )
        return
    assert kd.lora_options is not None
    if kd.student_hf is None:
        raise MkdConfigError(
            f"--kd-lora is {kd.lora}, but there are no weights to freeze: give the student's Hugging Face folder in "
            "--kd-student-hf"
        )


def check_mlflow(kd: KDFields) -> None:
    """Refuse --kd-mlflow-uri without --kd-mlflow-experiment, or with a password, which everyone on the machine and
    every reader of the checkpoints would see."""
    if kd.mlflow_uri is not None and _PASSWORD.search(kd.mlflow_uri):
        raise MkdConfigError(
            "--kd-mlflow-uri has a password: command lines, checkpoints and kd_config.json are not the place for one; "
            "set the environment variable MLFLOW_TRACKING_URI instead, and leave the flag out"
        )
    if kd.mlflow_uri is not None and kd.mlflow_experiment is None:
        raise MkdConfigError(
            f"--kd-mlflow-uri is {kd.mlflow_uri}, but nothing is written to MLflow: give --kd-mlflow-experiment, or "
            "leave it out"
        )
