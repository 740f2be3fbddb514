"""Selects the checkpoint that a job resumes from, and checks that it belongs to this job.

Step by step:

1. `select` (every rank, before anything is built; changes no file): the folder that the tracker file
   `latest_checkpointed_iteration.txt` names, if it is complete (`integrity.find_damage`); otherwise the newest complete
   `iter_XXXXXXX` folder, provided that the job also saves there. With `--ckpt-step N`, iteration N and no other.
   If a tracker exists and no checkpoint is complete, the job exits with an error instead of restarting from iteration
   0. Without a tracker no save has ever completed, and the job starts.
2. `check_same_job`, `check_teacher`, `changed_settings`: architecture, teacher and settings in the checkpoint against
   those of this job.
3. `resolve` (collective, before megatron loads): the ranks agree on the selection and compare the SHA-256 of its files;
   a checkpoint that fails is rejected, and `select` is called again. Rank 0 then repairs the folder: incomplete folders
   are renamed, nothing is deleted, and the tracker names the resolved checkpoint.

docs/checkpoints.md, "Resume", describes the same for users.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mkd.checkpoint.megatron.folder import TRACKER, TRACKER_BYTES, iteration_name, iteration_of, tracked_folder
from mkd.checkpoint.megatron.integrity import changed_files, find_damage
from mkd.checkpoint.ranks import gather_objects
from mkd.config.megatron.arg_names import ArgRole, comparable, names_with
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.utils.atomic_files import rename, replacing
from mkd.utils.json_files import read_json, read_regular
from mkd.utils.logging import logger

SET_ASIDE = "torn_"
"""Prefix of the new name of an incomplete folder."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a job resumes from, and the state of the other folders beside it."""

    root: Path
    """The folder in --load."""
    name: str | None
    """The subfolder that is read, such as iter_0000100 or release; None if there is no checkpoint."""
    incomplete: Mapping[str, str] = field(default_factory=dict)
    """Incomplete folders -> reason."""
    unused: tuple[str, ...] = ()
    """Complete folders of later iterations than the tracker names."""

    @property
    def folder(self) -> Path | None:
        """The folder that is read."""
        return None if self.name is None else self.root / self.name

    @property
    def tracked(self) -> str | None:
        """Content of the tracker that names this checkpoint: an iteration number, or release."""
        return self.name if self.name in (None, "release") else str(iteration_of(self.name))


def select(root: Path, *, own: bool, step: int | None = None, rejected: Mapping[str, str] | None = None) -> ResumePoint:
    """Select a checkpoint in a folder. No file is changed, so that all ranks see the same.

    Args:
        root: the folder in --load.
        own: True if the job also saves there. Only then may the result differ from the checkpoint that the tracker
            names.
        step: --ckpt-step: this iteration and no other.
        rejected: folders with damaged content -> reason.

    Raises:
        MkdCheckpointError: there are checkpoints, and none can be used.
    """
    rejected = rejected or {}
    if step is not None:
        return _select_step(root, iteration_name(step), f"--load {root} --ckpt-step {step}", rejected)
    text, named = _read_tracker(root)
    found = sorted((path.name for path in root.glob("iter_*") if _is_iteration(path)), key=_order, reverse=True)
    candidates = found if named is None else [named, *(name for name in found if name != named)]
    incomplete: dict[str, str] = {}
    selected = None
    for name in candidates:
        reason = _damage(root, name, rejected)
        if reason is None:
            selected = name
            break
        incomplete[name] = reason
    because = _reasons(text, named, incomplete)
    if selected is None and (text is not None or rejected):
        raise MkdCheckpointError(f"--load {root} has no complete checkpoint: {because}")
    if not own and selected is not None and (named is None or incomplete):
        raise MkdCheckpointError(
            f"--load {root}: {because}. The newest complete checkpoint there is {selected}: "
            f"give --ckpt-step {_order(selected)} to continue from it"
        )
    others = [name for name in found if name not in incomplete]
    later = [name for name in others if selected is not None and _order(name) > _order(selected)]
    damages = {name: _damage(root, name, rejected) for name in later}
    incomplete |= {name: reason for name, reason in damages.items() if reason is not None}
    return ResumePoint(root, selected, incomplete, tuple(name for name, reason in damages.items() if reason is None))


def resolve(point: ResumePoint, *, own: bool, step: int | None, check_content: bool) -> ResumePoint:
    """Check the content of the selected checkpoint and repair the folder, before megatron loads.

    Collective over all ranks: they share the reading and return the same result. Only rank 0 changes the folder, and
    only if the job saves there (`own`).

    Raises:
        MkdCheckpointError: on all ranks, when no checkpoint is left or the ranks see different ones.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = gather_objects(point.name)
    if len(set(names)) > 1:
        raise MkdCheckpointError(
            f"--load {point.root}: the ranks find different checkpoints there ({', '.join(map(str, names))}): is it "
            "the same folder on every node?"
        )
    rejected: dict[str, str] = {}
    while check_content and point.name is not None:
        problems = [text for found in gather_objects(changed_files(point.folder, rank, ranks)) for text in found]
        if not problems:
            break
        rejected[point.name] = problems[0]
        point = select(point.root, own=own, step=step, rejected=rejected)
    if rank == 0 and own and step is None:
        _repair(point)
    dist.barrier()
    return point


def check_same_teacher_everywhere(fingerprint: str | None, teacher: str) -> None:
    """Refuse a teacher whose folder differs between nodes. Collective over all ranks.

    Args:
        fingerprint: fingerprint of the teacher that this rank has read.
        teacher: its flag and folder.

    Raises:
        MkdCheckpointError: on all ranks.
    """
    found = gather_objects(fingerprint)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise MkdCheckpointError(
                f"{teacher} is {found[0]} on rank 0 and {other} on rank {rank}: is it the same folder on every node?"
            )


def check_same_job(args: Namespace, stored: Namespace, origin: str) -> None:
    """Refuse a checkpoint of a model with another architecture.

    Args:
        args: Megatron's arguments of this job, complete.
        stored: Megatron's arguments in the checkpoint.
        origin: the flag and folder to name.

    Raises:
        MkdCheckpointError: naming the first value that differs.
    """
    names = names_with(ArgRole.SHAPE) + (() if args.finetune else names_with(ArgRole.MEANING))
    for name in names:
        if not hasattr(stored, name):
            continue
        there, here = getattr(stored, name), getattr(args, name, None)
        is_same = comparable(name, vars(stored)) == comparable(name, vars(args))
        if not is_same and not (name == "vocab_size" and None in (there, here)):
            flag = f"--{name.replace('_', '-')}"
            raise MkdCheckpointError(
                f"{origin} is a checkpoint of another model: {flag} is {there} there and {here} in this job"
            )


def check_teacher(fingerprint: str, stored: Namespace, teacher: str, origin: str, other_allowed: bool) -> str | None:
    """Refuse to continue with another teacher than the checkpoint was trained with.

    Args:
        fingerprint: fingerprint of this job's teacher.
        stored: Megatron's arguments in the checkpoint; without a fingerprint (no teacher so far) any teacher is
            accepted.
        teacher: the flag and folder of this job's teacher.
        origin: the flag and folder of the checkpoint.
        other_allowed: --kd-other-teacher.

    Returns:
        A line to print when the teacher differs and --kd-other-teacher is given; else None.

    Raises:
        MkdConfigError: the teacher differs.
    """
    before = RunState.read_from(stored).teacher_fingerprint
    if before in (None, fingerprint):
        return None
    text = f"{origin} was trained with the teacher {before}, {teacher} is {fingerprint}"
    if not other_allowed:
        raise MkdConfigError(f"{text}: give the same teacher, or --kd-other-teacher if the change is intended")
    return text


def changed_settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that differ from those in the checkpoint, such as "--kd-ratio 0.5 -> 0.9"; only names in both count."""
    return [
        f"--{name.replace('_', '-')} {stored[name]} -> {value}"
        for name, value in now.items()
        if name in stored and stored[name] != value
    ]


def _select_step(root: Path, name: str, origin: str, rejected: Mapping[str, str]) -> ResumePoint:
    if not (root / name).is_dir():
        raise MkdCheckpointError(f"{origin}: there is no {name}")
    if (reason := _damage(root, name, rejected)) is not None:
        raise MkdCheckpointError(f"{origin}: {name} is not complete: {reason}")
    return ResumePoint(root, name)


def _read_tracker(root: Path) -> tuple[str | None, str | None]:
    """(text of the tracker, folder that it names); None for a missing file, or for a text that names no folder."""
    try:
        text = read_regular(root / TRACKER, TRACKER_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except ValueError as error:  # a pipe or a device
        raise MkdCheckpointError(f"{root / TRACKER}: {error}; remove it") from error
    return text, tracked_folder(text)


def _damage(root: Path, name: str, rejected: Mapping[str, str]) -> str | None:
    """The reason why a folder cannot be used, or None.

    Raises:
        MkdCheckpointError: the checkpoint is in another format.
    """
    folder = root / name
    if name in rejected:
        return rejected[name]
    if not folder.is_dir():
        return f"{TRACKER} names it, but it does not exist"
    reason = find_damage(folder)
    if reason is not None and next(folder.glob("mp_rank_*"), None) is not None:
        raise MkdCheckpointError(
            f"--load {root}: {name} is in Megatron's format torch; only torch_dist is read (--ckpt-format torch_dist)"
        )
    if reason is None and (kind := read_json(folder / "metadata.json").get("sharded_backend")) != "torch_dist":
        raise MkdCheckpointError(
            f"--load {root}: {name} is in the format {kind}; only torch_dist is read (--ckpt-format torch_dist)"
        )
    return reason


def _reasons(text: str | None, named: str | None, incomplete: Mapping[str, str]) -> str:
    """One clause with everything that is wrong with the folder in --load."""
    parts = [f"{name}: {reason}" for name, reason in incomplete.items()]
    if text is None:
        parts.insert(0, f"there is no {TRACKER}")
    elif named is None:
        parts.insert(0, f"{TRACKER} holds {text[:40]!r} instead of an iteration number")
    return "; ".join(parts)


def _repair(point: ResumePoint) -> None:
    """Rename incomplete folders, and write the resume point into the tracker."""
    for name, reason in point.incomplete.items():
        if (point.root / name).is_dir():
            aside = _free_name(point.root / f"{SET_ASIDE}{name}")
            rename(point.root / name, aside)
            logger.warning(f"{name} in {point.root} is not complete ({reason}): renamed to {aside.name}")
        else:
            logger.warning(f"{name} in {point.root}: {reason}")
    for name in point.unused:
        logger.warning(f"{name} in {point.root} is later than the tracker's iteration, and is not used")
    if point.name is None:
        return
    text, _ = _read_tracker(point.root)
    if text != point.tracked:
        logger.info(f"continuing from {point.name}; {TRACKER} was {text!r}")
        with replacing(point.root / TRACKER) as tracker:
            tracker.write(point.tracked)


def _free_name(path: Path) -> Path:
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 1000))]
    return next(name for name in names if not name.exists())


def _is_iteration(path: Path) -> bool:
    """True for a folder with megatron's name of an iteration; a copy such as iter_0000100.bak is not one."""
    iteration = iteration_of(path.name)
    return iteration is not None and iteration_name(iteration) == path.name and path.is_dir()


def _order(name: str) -> int:
    """Iteration of a folder; `release` counts as iteration 0."""
    return iteration_of(name) or 0
