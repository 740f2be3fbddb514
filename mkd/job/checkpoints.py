"""A job and its checkpoints: which one it continues from, and what it leaves behind."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

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
from mkd.checkpoint.saving import Saving
from mkd.checkpoint.source import TeacherSource
from mkd.config import megatron_args
from mkd.config.kd_config import KDConfig
from mkd.config.megatron_arg_names import ArgRole, names_with
from mkd.config.run_state import RunState


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
    MegatronFolder(args.pretrained_checkpoint, "--pretrained-checkpoint").check_shards()


def check_checkpoint(
    args: Namespace, kd: KDConfig, state: RunState, point: ResumePoint | None, teacher: TeacherSource
) -> list[str]:
    """Compare the checkpoint with this job, and set the run's state: the teacher's fingerprint, and from the checkpoint
    the balance factor and the unfinished evaluation.

    Returns:
        Differences that are allowed, as lines to print.

    Raises:
        MkdCheckpointError: it is of another model.
        MkdConfigError: it was trained with another teacher, or another schedule of the learning rate.
    """
    state.teacher_fingerprint = None if kd.is_plain_pretraining else teacher.fingerprint()
    state.unfinished_evaluation, state.balance_factor = False, 1.0
    if point is None or point.folder is None:
        return []
    folder, origin = MegatronFolder(point.folder, "--load"), f"--load {point.folder}"
    stored = folder.args
    check_same_job(args, stored, origin)
    if args.finetune:
        return []
    notes = []
    if point.name != "release" and not args.no_load_optim and folder.scheduler is not None:
        notes = check_schedule(args, stored, folder.scheduler, origin)
    before = RunState.read_from(stored)
    state.unfinished_evaluation, state.balance_factor = before.unfinished_evaluation, before.balance_factor
    if kd.is_plain_pretraining:
        state.teacher_fingerprint = before.teacher_fingerprint
        return notes
    note = check_teacher(state.teacher_fingerprint, stored, teacher.origin, origin, kd.other_teacher)
    now = {f"kd_{name}": value for name, value in asdict(kd).items() if name not in _NOT_THE_OBJECTIVE}
    now |= {name: vars(args)[name] for name in names_with(ArgRole.SAMPLES)}
    return notes + [note] * (note is not None) + changed_settings(vars(stored), now)


_NOT_THE_OBJECTIVE = {
    "teacher_hf",
    "teacher_load",
    "teacher_cache",
    "student_hf",
    "save_hf_interval",
    "save_hf_keep",
    "skip_checkpoint_hashes",
    "other_teacher",
    "allow_bad_teacher",
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


def prepare_saving(args: Namespace, kd: KDConfig, state: RunState) -> Saving:
    """Claim the folder in --save and remove unfinished Hugging Face folders in it. Collective over all ranks.

    Returns:
        The hooks around each save.
    """
    root, export = Path(args.save or "."), None
    if kd.save_hf_interval is not None:
        snapshots = Snapshots(root, kd.save_hf_interval, kd.save_hf_keep)
        snapshots.clean()
        export = snapshots.take
    saving = Saving(root, hashes=not kd.skip_checkpoint_hashes, state=state, on_published=export)
    if args.save is not None:
        saving.claim()
    return saving
