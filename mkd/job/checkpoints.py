"""A job and its checkpoints: which one it continues from, and what it leaves behind."""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mkd.checkpoint.adapters.export import write_snapshot
from mkd.checkpoint.best import BestCheckpoint
from mkd.checkpoint.hf.snapshot import Snapshots
from mkd.checkpoint.lr_schedule import check_schedule
from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.checkpoint.resume_point import (
    ResumePoint,
    changed_settings,
    check_same_job,
    check_same_teacher_everywhere,
    check_teacher,
    resolve,
    select,
)
from mkd.checkpoint.retention import Retention
from mkd.checkpoint.saving import Saving
from mkd.checkpoint.source import TeacherSource
from mkd.config import megatron_args
from mkd.config.data_args import training_prefixes
from mkd.config.epochs import iterations_are_unknown
from mkd.config.kd_config import KDConfig
from mkd.config.megatron_arg_names import ArgRole, names_with
from mkd.config.megatron_checks import check_batches_grow
from mkd.config.run_state import RunState
from mkd.data.sources.stores import content_fingerprint, is_chat_file
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.job.memory.stage_layers import chunks_of_stage
from mkd.utils.atomic_files import hash_of
from mkd.utils.logging import logger
from mkd.utils.pretrained import tokenizer_fingerprint
from mkd.utils.tokenizer_flag import tokenizer_flag


def select_checkpoint(args: Namespace, state: RunState) -> ResumePoint | None:
    """The checkpoint in --load, also set in `state`; None for formats that mkd does not inspect. Changes no file.

    Raises:
        MkdCheckpointError: there are checkpoints, and none may be used.
    """
    if args.ckpt_format != "torch_dist":
        state.resume_from = str(Path(args.load)) if megatron_args.has_checkpoint(args.load) else None
        return None
    if args.load is None:
        state.resume_from = None
        return None
    point = select(Path(args.load), own=megatron_args.saves_where_it_loads(args), step=args.ckpt_step)
    state.resume_from = None if point.folder is None else str(point.folder)
    return point


def adopt_from_checkpoint(args: Namespace, state: RunState) -> None:
    """Adopt the architecture that megatron-core 0.19's --use-checkpoint-args leaves out (`ArgRole.ADOPTED`), in place.

    Raises:
        MkdConfigError: a flag on the command line contradicts the checkpoint.
    """
    path = state.resume_from or args.pretrained_checkpoint
    if path is None:
        return
    stored = vars(MegatronFolder(path, "--use-checkpoint-args").args)
    values = {name: stored[name] for name in names_with(ArgRole.ADOPTED) if name in stored}
    megatron_args.adopt_architecture(args, values, f"the checkpoint in {path}")


def check_first_weights(args: Namespace, state: RunState) -> None:
    """Refuse an incomplete --pretrained-checkpoint, if the job starts from it.

    Raises:
        MkdCheckpointError: naming the file that is missing or damaged.
    """
    if args.pretrained_checkpoint is None or state.resumes or args.ckpt_format != "torch_dist":
        return
    folder = MegatronFolder(args.pretrained_checkpoint, "--pretrained-checkpoint")
    folder.check_whole()
    folder.check_shards()


def check_checkpoint(
    args: Namespace, kd: KDConfig, state: RunState, point: ResumePoint | None, teacher: TeacherSource
) -> list[str]:
    """Compare the checkpoint with this job, and set the run's state: the teacher's fingerprint, and from the checkpoint
    the balance factor, the unfinished evaluation, the texts of --kd-rollout-steps and the rollouts that run away.

    Returns:
        Differences that are allowed, as lines to print.

    Raises:
        MkdCheckpointError: it is of another model.
        MkdConfigError: it was trained with another teacher, or another schedule of the learning rate; or batches become
            smaller after it.
    """
    state.teacher_fingerprint = None if kd.is_plain_pretraining else teacher.fingerprint()
    state.unfinished_evaluation, state.balance_factor = False, 1.0
    state.rollout, state.runaway_rollouts = None, ()
    if point is None or point.folder is None:
        check_batches_grow(args, 0)
        return []
    folder, origin = MegatronFolder(point.folder, "--load"), f"--load {point.folder}"
    stored = folder.args
    check_batches_grow(args, 0 if args.finetune else getattr(stored, "consumed_train_samples", 0))
    check_same_job(args, stored, origin)
    check_same_base(kd, state.base_fingerprint, folder, origin)
    if args.finetune:
        return []
    if point.name != "release":
        check_optimizer_layout(args, folder, origin)
        check_same_optimizer(args, folder, origin)
    notes = [] if iterations_are_unknown(args) else check_stored_schedule(args, point)
    before = RunState.read_from(stored)
    state.unfinished_evaluation, state.balance_factor = before.unfinished_evaluation, before.balance_factor
    state.rollout, state.runaway_rollouts = before.rollout, before.runaway_rollouts
    if kd.is_plain_pretraining:
        state.teacher_fingerprint = before.teacher_fingerprint
        return notes
    note = check_teacher(state.teacher_fingerprint, stored, teacher.origin, origin, kd.other_teacher)
    now = {f"kd_{name}": value for name, value in asdict(kd).items() if name not in _NOT_THE_OBJECTIVE}
    now |= {name: vars(args)[name] for name in (*names_with(ArgRole.SAMPLES), *_TRAINING)}
    return notes + [note] * (note is not None) + changed_settings(vars(stored), now)


def check_same_base(kd: KDConfig, base: str | None, folder: MegatronFolder, origin: str) -> None:
    """Refuse to continue adapters as whole weights or the reverse, and adapters of other frozen weights.

    Args:
        kd: the flags.
        base: fingerprint of this job's frozen weights; None without adapters.
        folder: the checkpoint.
        origin: its flag and folder.

    Raises:
        MkdConfigError: --kd-lora is given or missing.
        MkdCheckpointError: the frozen weights are others.
    """
    there = folder.base_fingerprint
    if there == base:
        return
    if base is None:
        stored = vars(folder.args)
        raise MkdConfigError(
            f"{origin} holds adapters without the weights under them: give --kd-lora {stored.get('kd_lora')} and "
            f"--kd-student-hf {stored.get('kd_student_hf')}, or another --load"
        )
    if there is None:
        raise MkdConfigError(
            f"{origin} holds all weights of a student, and --kd-lora {kd.lora} trains adapters of frozen ones: give "
            "another --load, or leave --kd-lora out"
        )
    raise MkdCheckpointError(
        f"{origin} has adapters of other weights: those of fingerprint {there}, and --kd-student-hf {kd.student_hf} "
        f"has {base}; give the folder that the run began with"
    )


def check_optimizer_layout(args: Namespace, folder: MegatronFolder, origin: str) -> None:
    """Refuse to resume a distributed optimizer in another layout than the one in which its state can be read.

    megatron-core 0.19 refuses other tensor- and pipeline-parallel sizes only, after all models are loaded, with a flag
    that it no longer has. Several flags can divide the layers among pipeline stages in the same way.

    Raises:
        MkdConfigError: naming each size that differs, and the flags of another division of the layers.
    """
    stored = vars(folder.args)
    is_read = args.use_distributed_optimizer and not args.no_load_optim and not stored.get("no_save_optim")
    if not is_read or folder.optimizer_format != FIXED_LAYOUT:
        return
    names = _different(_OPTIMIZER_SIZES, args, stored)
    if names or not _has_same_stages(args, stored):
        names += _different(names_with(ArgRole.STAGES), args, stored)
    if names:
        sizes = ", ".join(f"--{name.replace('_', '-')} {stored[name]} (here {getattr(args, name)})" for name in names)
        raise MkdConfigError(
            f"{origin} has its optimizer's state for one layout only: {sizes}. Resume in that layout with "
            f"{RESHARDABLE}, and change the layout after the next save; or give --no-load-optim to continue with the "
            "weights alone"
        )


def check_same_optimizer(args: Namespace, folder: MegatronFolder, origin: str) -> None:
    """Refuse to resume the state of an optimizer of another kind or precision, which megatron-core 0.19 cannot read,
    and options of the optimizer that it reads from the checkpoint, so that their flags would have no effect.

    Raises:
        MkdConfigError: naming each option that differs.
    """
    stored = vars(folder.args)
    if args.no_load_optim or stored.get("no_save_optim"):
        return
    names = ["optimizer", "use_distributed_optimizer"]
    names += ["sgd_momentum"] if args.optimizer == "sgd" else ["adam_beta1", "adam_beta2", "adam_eps"]
    in_half = [values.get("bf16") or values.get("fp16") for values in (stored, vars(args))]
    fixed = args.use_distributed_optimizer and folder.optimizer_format == FIXED_LAYOUT
    if fixed or (not args.use_distributed_optimizer and in_half[0] != in_half[1]):
        names += ["bf16", "fp16"]  # names of the buffers, or fp32 parameters beside those of the model
    others = [name for name in names if name in stored and stored[name] != getattr(args, name)]
    if others:
        texts = [f"--{name.replace('_', '-')} {stored[name]} (here {getattr(args, name)})" for name in others]
        raise MkdConfigError(
            f"{origin} has the state of an optimizer with {', '.join(texts)}: give the same flags, or --no-load-optim "
            "to continue with the weights alone"
        )


FIXED_LAYOUT = "dp_reshardable"
"""Megatron's default format of a distributed optimizer, which is read with any data- or context-parallel size."""
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
_OPTIMIZER_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _different(names: Iterable[str], args: Namespace, stored: Mapping[str, Any]) -> list[str]:
    """Names of the arguments whose stored value is not that of `args`; a value that is not stored is the same."""
    return [name for name in names if name in stored and stored[name] != getattr(args, name)]


def _has_same_stages(args: Namespace, stored: Mapping[str, Any]) -> bool:
    """True if the layers of each pipeline stage, and of its virtual stages, are those of the checkpoint; the parallel
    sizes must be."""
    kept = {name: stored[name] for name in names_with(ArgRole.STAGES) if name in stored}
    there = Namespace(**{**vars(args), **kept})
    stages = range(args.pipeline_model_parallel_size)
    return all(chunks_of_stage(there, stage) == chunks_of_stage(args, stage) for stage in stages)


def check_stored_schedule(args: Namespace, point: ResumePoint | None) -> list[str]:
    """Compare the schedule of the learning rate in the checkpoint with this job's: see `check_schedule`."""
    if point is None or point.folder is None or point.name == "release" or args.finetune or args.no_load_optim:
        return []
    folder = MegatronFolder(point.folder, "--load")
    if folder.scheduler is None:
        return []
    return check_schedule(args, folder.args, folder.scheduler, f"--load {point.folder}")


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


_ROW_OPTIONS = ("kd_packing", "kd_packing_multiple", "kd_long_samples", "kd_teacher_seq_length")


def _of_rows(stored: Mapping[str, Any], args: Namespace, kd: KDConfig) -> list[str]:
    """Names of arguments that determine the rows and differ from those in the checkpoint. Files may have moved: their
    fingerprints are compared instead of their names."""
    now = {name: getattr(args, name) for name in names_with(ArgRole.SAMPLES) if "data_" not in name}
    now |= {name: getattr(kd, name.removeprefix("kd_")) for name in _ROW_OPTIONS}
    return [name for name, value in now.items() if name in stored and stored[name] != value]


_TRAINING = (
    *("clip_grad", "attention_dropout", "hidden_dropout", "eod_mask_loss", "reset_position_ids"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_input_jitter_eps"),
)
"""Arguments of Megatron that change what is learned, and not the model."""

_NOT_THE_OBJECTIVE = {
    "teacher_hf",
    "teacher_load",
    "teacher_cache",
    "teacher_url",
    "teacher_api",
    "teacher_ahead",
    "teacher_buffer_gb",
    "teacher_timeout",
    "teacher_tokenizer",
    "teacher_targets",
    "teacher_samples",
    "teacher_states_dir",
    "teacher_head_hf",
    "student_hf",
    "save_hf_interval",
    "save_hf_keep",
    "keep_last",
    "keep_best",
    "epochs",
    "sample_prompts",
    "sample_tokens",
    "eval_tasks",
    "eval_tokens",
    "rollout_url",
    "rollout_api",
    "rollout_weights",
    "rollout_timeout",
    "skip_checkpoint_hashes",
    "other_teacher",
    "allow_bad_teacher",
    "same_tokenizer",
    "metrics_file",
    "config",
    "dry_run",
    "verbose",
    "log_level",
}


def resolve_checkpoint(
    args: Namespace, kd: KDConfig, state: RunState, point: ResumePoint | None, teacher: TeacherSource
) -> None:
    """Agree on teacher and checkpoint, check its content, and repair the folder, before Megatron loads it.

    Collective over all ranks.

    Raises:
        MkdCheckpointError: no checkpoint is left, or the ranks see different ones, or different teachers.
        MkdError: as `check_checkpoint`, where another one is taken than was chosen at first.
    """
    check_same_teacher_everywhere(state.teacher_fingerprint, teacher.origin)
    if point is None:
        return
    own = megatron_args.saves_where_it_loads(args)
    resolved = resolve(point, own=own, step=args.ckpt_step, check_content=not kd.skip_checkpoint_hashes)
    state.resume_from = None if resolved.folder is None else str(resolved.folder)
    if resolved.name != point.name:
        check_checkpoint(args, kd, state, resolved, teacher)


def best_checkpoint(args: Namespace, kd: KDConfig) -> BestCheckpoint | None:
    """The best checkpoint in --save so far; None without --kd-keep-best.

    Raises:
        MkdCheckpointError: the file that names it is damaged.
    """
    return None if kd.keep_best is None else BestCheckpoint(Path(args.save), kd.keep_best)


def prepare_saving(args: Namespace, kd: KDConfig, state: RunState, best: BestCheckpoint | None = None) -> Saving:
    """Claim the folder in --save and remove unfinished folders in it. Collective over all ranks.

    With --kd-keep-last, megatron's own removal is turned off: after each save it removes the previous checkpoint.

    Returns:
        The hooks around each save.
    """
    root, actions = Path(args.save or "."), []
    if kd.save_hf_interval is not None:
        write = None if kd.lora is None else write_snapshot
        snapshots = Snapshots(root, kd.save_hf_interval, kd.save_hf_keep, write)
        snapshots.clean()
        actions.append(snapshots.take)
    if best is not None:
        actions.append(best.published)
    if kd.keep_last is not None:
        retention = Retention(root, kd.keep_last, args.save_retain_interval, best)
        retention.clean()
        actions.append(retention.remove_old)
        args.save_retain_interval = None
    saving = Saving(root, hashes=not kd.skip_checkpoint_hashes, state=state, on_published=actions)
    if args.save is not None:
        saving.claim()
        if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
            logger.info(
                "checkpoints of this job can be resumed with other data- and context-parallel sizes; for other "
                f"tensor-, pipeline- and expert-parallel sizes give {RESHARDABLE} (docs/checkpoints.md)"
            )
    return saving
