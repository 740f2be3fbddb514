"""Which checkpoint a job continues from, and whether it is one of this job.

The tracker file names the last checkpoint that was saved. If that one is not complete, the newest complete one takes
its place, and the incomplete one is renamed; docs/checkpoints.md has the rules.
"""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mkd.checkpoint.integrity import changed_files, find_damage
from mkd.checkpoint.megatron_folder import TRACKER
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.utils.atomic_files import replacing, sync_folder

SET_ASIDE = "torn_"
"""Beginning of the new name of a folder that was set aside."""


@dataclass(frozen=True)
class ResumePoint:
    """What a job continues from."""

    root: Path
    """The folder in --load."""
    name: str | None
    """Its folder that is read, such as iter_0000100 or release; None: there is no checkpoint, the job begins."""
    incomplete: Mapping[str, str] = field(default_factory=dict)
    """Folders that are not complete -> why not."""
    unused: tuple[str, ...] = ()
    """Complete folders of later iterations than the tracker names."""

    @property
    def folder(self) -> Path | None:
        """The folder that is read."""
        return None if self.name is None else self.root / self.name

    @property
    def tracked(self) -> str | None:
        """What the tracker must say: an iteration number, or release."""
        return self.name if self.name in (None, "release") else str(int(self.name.removeprefix("iter_")))


def select(
    root: Path, *, own: bool, step: int | None = None, rejected: Mapping[str, str] | None = None, flag: str = "--load"
) -> ResumePoint:
    """Look through a folder; nothing in it is changed, so that all ranks see the same.

    Args:
        root: the folder in --load.
        own: whether the job also saves there. Only then may another checkpoint be taken than the tracker names.
        step: --ckpt-step: this iteration and no other.
        rejected: folders that are known to be damaged -> why.
        flag: for messages.

    Raises:
        MkdCheckpointError: there were checkpoints, and none may be used.
    """
    if step is not None:
        return _select_step(root, f"iter_{step:07d}", f"{flag} {root} --ckpt-step {step}", rejected or {})
    text, named = _read_tracker(root)
    found = sorted((path.name for path in root.glob("iter_*") if _is_iteration(path)), key=_number, reverse=True)
    candidates = found if named is None else [named, *(name for name in found if name != named)]
    incomplete: dict[str, str] = {}
    chosen = None
    for name in candidates:
        reason = _damage(root, name, rejected or {}, flag)
        if reason is None:
            chosen = name
            break
        incomplete[name] = reason
    because = _reasons(text, named, incomplete)
    if chosen is None and (text is not None or rejected):
        raise MkdCheckpointError(f"{flag} {root} has no complete checkpoint: {because}")
    if not own and chosen is not None and (named is None or incomplete):
        raise MkdCheckpointError(
            f"{flag} {root}: {because}. The newest complete checkpoint there is {chosen}: "
            f"give --ckpt-step {_number(chosen)} to continue from it"
        )
    later = [
        name for name in found if chosen is not None and _number(name) > _number(chosen) and name not in incomplete
    ]
    damages = {name: _damage(root, name, rejected or {}, flag) for name in later}
    incomplete |= {name: reason for name, reason in damages.items() if reason is not None}
    return ResumePoint(root, chosen, incomplete, tuple(name for name, reason in damages.items() if reason is None))


def resolve(point: ResumePoint, *, own: bool, step: int | None, check_content: bool) -> ResumePoint:
    """Before megatron loads: check the chosen files' content, set incomplete folders aside, mend the tracker.

    Collective over all ranks: they share the reading, and agree on the answer. Rank 0 alone changes the folder, and
    only when the job saves there (`own`).

    Raises:
        MkdCheckpointError: on all ranks, when no checkpoint is left or the ranks see different ones.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = _from_all(point.name)
    if len(set(names)) > 1:
        raise MkdCheckpointError(
            f"--load {point.root}: the ranks find different checkpoints there ({', '.join(map(str, names))}): is it "
            "the same folder on every node?"
        )
    rejected: dict[str, str] = {}
    while check_content and point.name is not None:
        problems = [text for found in _from_all(changed_files(point.folder, rank, ranks)) for text in found]
        if not problems:
            break
        rejected[point.name] = problems[0]
        point = select(point.root, own=own, step=step, rejected=rejected)
    if rank == 0 and own and step is None:
        _repair(point)
    dist.barrier()
    return point


def check_same_teacher_everywhere(fingerprint: str | None, teacher: str) -> None:
    """Refuse a teacher's folder that is another one on some node. Collective over all ranks.

    Args:
        fingerprint: of the teacher, as this rank read it.
        teacher: its flag and folder.

    Raises:
        MkdCheckpointError: on all ranks.
    """
    found = _from_all(fingerprint)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise MkdCheckpointError(
                f"{teacher} is {found[0]} on rank 0 and {other} on rank {rank}: is it the same folder on every node?"
            )


def check_same_job(args: Namespace, stored: Namespace, origin: str) -> None:
    """Refuse a checkpoint of a model with another architecture.

    Args:
        args: Megatron's, of this job, complete.
        stored: those in the checkpoint.
        origin: the flag and folder to name.

    Raises:
        MkdCheckpointError: naming the first value that differs.
    """
    names = _SHAPES if args.finetune else _SHAPES + _KINDS
    for name in names:
        if not hasattr(stored, name):
            continue
        there, here = getattr(stored, name), getattr(args, name, None)
        if there != here and not (name == "vocab_size" and None in (there, here)):
            flag = f"--{name.replace('_', '-')}"
            raise MkdCheckpointError(
                f"{origin} is a checkpoint of another model: {flag} is {there} there and {here} in this job"
            )


def check_teacher(fingerprint: str, stored: Namespace, teacher: str, origin: str, other_allowed: bool) -> str | None:
    """Refuse to continue with another teacher than the checkpoint was trained with.

    Args:
        fingerprint: of this job's teacher.
        stored: Megatron's arguments in the checkpoint; without a fingerprint (no teacher so far) anything goes.
        teacher: the flag and folder of this job's teacher.
        origin: the flag and folder of the checkpoint.
        other_allowed: --kd-other-teacher.

    Returns:
        A line to print when the teacher is another one and may be; else None.

    Raises:
        MkdConfigError: it is another one.
    """
    had = getattr(stored, "kd_teacher_fingerprint", None)
    if had in (None, fingerprint):
        return None
    text = f"{origin} was trained with the teacher {had}, {teacher} is {fingerprint}"
    if not other_allowed:
        raise MkdConfigError(f"{text}: give the same teacher, or --kd-other-teacher if the change is meant")
    return text


def changed_settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What this job sets otherwise than the checkpoint's: "--kd-ratio 0.5 -> 0.9", for each argument in both."""
    return [
        f"--{name.replace('_', '-')} {stored[name]} -> {value}"
        for name, value in now.items()
        if name in stored and stored[name] != value
    ]


# What gives the parameters their shapes, and what gives them their meaning.
_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "swiglu",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    "qk_layernorm",
    "add_qkv_bias",
    "add_bias_linear",
)
_KINDS = (
    "normalization",
    "layernorm_epsilon",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_interleaved",
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    "layernorm_zero_centered_gamma",
    "quick_geglu",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
)


def _select_step(root: Path, name: str, origin: str, rejected: Mapping[str, str]) -> ResumePoint:
    if not (root / name).is_dir():
        raise MkdCheckpointError(f"{origin}: there is no {name}")
    if (reason := _damage(root, name, rejected, origin)) is not None:
        raise MkdCheckpointError(f"{origin}: {name} is not complete: {reason}")
    return ResumePoint(root, name)


def _read_tracker(root: Path) -> tuple[str | None, str | None]:
    """(its text, the folder that it names); None for a file that is not there, or a text that names nothing."""
    try:
        text = (root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    if text == "release":
        return text, text
    return text, f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else None


def _damage(root: Path, name: str, rejected: Mapping[str, str], flag: str) -> str | None:
    """Why a folder does not count. Raises `MkdCheckpointError` for a sound one in another format."""
    folder = root / name
    if name in rejected:
        return rejected[name]
    if not folder.is_dir():
        return f"{TRACKER} names it, but it is not there"
    reason = find_damage(folder)
    if reason is not None and next(folder.glob("mp_rank_*"), None) is not None:
        raise MkdCheckpointError(
            f"{flag} {root}: {name} is in Megatron's format torch; only torch_dist is read (--ckpt-format torch_dist)"
        )
    if reason is None and (kind := json.loads((folder / "metadata.json").read_text()).get("sharded_backend")) != (
        "torch_dist"
    ):
        raise MkdCheckpointError(
            f"{flag} {root}: {name} is in the format {kind}; only torch_dist is read (--ckpt-format torch_dist)"
        )
    return reason


def _reasons(text: str | None, named: str | None, incomplete: Mapping[str, str]) -> str:
    """One clause on what is wrong with a folder."""
    parts = [f"{name}: {reason}" for name, reason in incomplete.items()]
    if text is None:
        parts.insert(0, f"there is no {TRACKER}")
    elif named is None:
        parts.insert(0, f"{TRACKER} holds {text[:40]!r} instead of an iteration number")
    return "; ".join(parts)


def _repair(point: ResumePoint) -> None:
    """Rename incomplete folders, and have the tracker name the chosen one."""
    for name, reason in point.incomplete.items():
        if (point.root / name).is_dir():
            aside = _free_name(point.root / f"{SET_ASIDE}{name}")
            (point.root / name).rename(aside)
            sync_folder(point.root)
            print(f"mkd: {name} in {point.root} is not complete ({reason}): renamed to {aside.name}", flush=True)
        else:
            print(f"mkd: {name} in {point.root}: {reason}", flush=True)
    for name in point.unused:
        print(f"mkd: {name} in {point.root} is later than the tracker says, and is not used", flush=True)
    if point.name is None:
        return
    text, _ = _read_tracker(point.root)
    if text != point.tracked:
        print(f"mkd: continuing from {point.name}; {TRACKER} was {text!r}", flush=True)
        with replacing(point.root / TRACKER) as tracker:
            tracker.write(point.tracked)


def _free_name(path: Path) -> Path:
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 1000))]
    return next(name for name in names if not name.exists())


def _is_iteration(path: Path) -> bool:
    """As megatron names them: somebody's copy, such as iter_0000100.bak, is none."""
    digits = path.name.removeprefix("iter_")
    return digits.isascii() and digits.isdigit() and f"iter_{int(digits):07d}" == path.name and path.is_dir()


def _number(name: str) -> int:
    digits = name.removeprefix("iter_")
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _from_all(value: Any) -> list[Any]:
    """What each rank has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
