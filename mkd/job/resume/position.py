"""Compares the training rows, prompts and tasks of a checkpoint with those of a job."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.resume_point import ResumePoint
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.data_args import training_prefixes
from mkd.config.run_state import RunState
from mkd.data.sources.stores import content_fingerprint, is_chat_file
from mkd.utils.atomic_files import hash_of
from mkd.utils.model_folders.pretrained import tokenizer_fingerprint
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag

_ROW_OPTIONS = ("kd_packing", "kd_packing_multiple", "kd_long_samples", "kd_teacher_seq_length")


def check_position(
    args: Namespace,
    kd: KDConfig,
    state: RunState,
    point: ResumePoint | None,
    foreign: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Compare the training rows, prompts and tasks of the checkpoint with this job's, and set the fingerprints of data,
    prompts, tasks and tokenizers in the run's state.

    A checkpoint's position in the data is a number of rows. It stands for the same text only if the rows are the same.

    Args:
        args: Megatron's.
        kd: the flags.
        state: set in place.
        point: the checkpoint to continue from.
        foreign: folder and flag of each tokenizer of a teacher that differs from the student's.

    Returns:
        Lines to print if the position stands for other texts or prompts now, and if the tasks are others.
    """
    names = training_prefixes(args)
    rows_are_texts = bool(foreign) or any(map(is_chat_file, names))
    tokenizers = []
    if (rows_are_texts or kd.is_on_policy) and args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model:
        tokenizers = [(args.tokenizer_model, tokenizer_flag(args)), *foreign]
    state.data_fingerprints = [content_fingerprint(name) for name in names]
    state.tokenizer_fingerprints = [tokenizer_fingerprint(*one) for one in tokenizers] or None
    state.prompts_fingerprint = _hash_of(kd.prompts if kd.is_on_policy else None)
    state.tasks_fingerprint = _hash_of(kd.eval_tasks)
    if point is None or point.folder is None or args.finetune:
        return []
    stored = MegatronFolder(point.folder, "--load").args
    before = RunState.read_from(stored)
    changed = [f"--{name.replace('_', '-')}" for name in _of_rows(vars(stored), args, kd)]
    if others := _others(before.data_fingerprints, state.data_fingerprints, names):
        changed.insert(0, f"the content of {', '.join(others)} in --data-path")
    folders = [f"tokenizer or chat template in {folder}" for folder, _ in tokenizers]
    tokens = _others(before.tokenizer_fingerprints, state.tokenizer_fingerprints, folders)
    changed += tokens if rows_are_texts else []
    notes = []
    if changed:
        row = getattr(stored, "consumed_train_samples", 0)
        notes.append(
            f"the rows of the training data, by {' and '.join(changed)}: the run continues at row {row:,} of the new "
            "order, so it skips some text and reads some again"
        )
    asked = _others([before.prompts_fingerprint], [state.prompts_fingerprint], [f"the content of {kd.prompts}"])
    if kd.is_on_policy and (asked := [*asked, *tokens]):
        notes.append(
            f"the prompts of --kd-prompts, by {' and '.join(asked)}: the run continues at the same position of the new "
            "prompts, so it may skip some and repeat others"
        )
    if _others([before.tasks_fingerprint], [state.tasks_fingerprint], ["tasks"]):
        compared = "" if kd.keep_best is None else ", with which --kd-keep-best compares those before"
        notes.append(f"the content of --kd-eval-tasks {kd.eval_tasks}: accuracies are of other tasks now{compared}")
    return notes


def _hash_of(file: str | None) -> str | None:
    """Hash of a file; None without one, and for a file that a later check refuses."""
    return None if file is None or not Path(file).is_file() else hash_of(Path(file))


def _others(before: Sequence[str | None] | None, now: Sequence[str | None] | None, names: Sequence[str]) -> list[str]:
    """Names whose fingerprint is not that of the checkpoint; empty if one of the two has no fingerprints."""
    if before is None or now is None or None in (*before, *now):
        return []
    return [name or "a file that is left out" for old, new, name in zip_longest(before, now, names) if old != new]


def _of_rows(stored: Mapping[str, Any], args: Namespace, kd: KDConfig) -> list[str]:
    """Names of arguments that determine the rows and differ from those in the checkpoint. Files may have moved: their
    fingerprints are compared instead of their names."""
    now = {name: getattr(args, name) for name in names_with(ArgRole.SAMPLES) if "data_" not in name}
    now |= {name: getattr(kd, name.removeprefix("kd_")) for name in _ROW_OPTIONS}
    return [name for name, value in now.items() if name in stored and stored[name] != value]
