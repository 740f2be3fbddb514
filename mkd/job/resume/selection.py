"""The checkpoint that a job continues from: selected, adopted, and agreed on by all ranks."""

from argparse import Namespace
from pathlib import Path

from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.resume_point import ResumePoint, check_same_teacher_everywhere, resolve, select
from mkd.checkpoint.source import TeacherSource
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.architecture import adopt_architecture
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.checks.checkpoints import has_checkpoint, saves_where_it_loads
from mkd.config.run_state import RunState
from mkd.job.resume.compare import check_checkpoint


def select_checkpoint(args: Namespace, state: RunState) -> ResumePoint | None:
    """The checkpoint in --load, also set in `state`; None for formats that mkd does not inspect. Changes no file.

    Raises:
        MkdCheckpointError: there are checkpoints, and none may be used.
    """
    if args.ckpt_format != "torch_dist":
        state.resume_from = str(Path(args.load)) if has_checkpoint(args.load) else None
        return None
    if args.load is None:
        state.resume_from = None
        return None
    point = select(Path(args.load), own=saves_where_it_loads(args), step=args.ckpt_step)
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
    step = None if state.resumes else args.ckpt_step
    stored = vars(MegatronFolder(path, "--use-checkpoint-args", step).args)
    values = {name: stored[name] for name in names_with(ArgRole.ADOPTED) if name in stored}
    adopt_architecture(args, values, f"the checkpoint in {path}")


def check_pretrained(args: Namespace, state: RunState) -> None:
    """Refuse an incomplete --pretrained-checkpoint, if the job starts from it.

    Raises:
        MkdCheckpointError: naming the file that is missing or damaged.
    """
    if args.pretrained_checkpoint is None or state.resumes or args.ckpt_format != "torch_dist":
        return
    folder = MegatronFolder(args.pretrained_checkpoint, "--pretrained-checkpoint", args.ckpt_step)
    folder.check_whole()
    folder.check_shards()


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
    own = saves_where_it_loads(args)
    resolved = resolve(point, own=own, step=args.ckpt_step, check_content=not kd.skip_checkpoint_hashes)
    state.resume_from = None if resolved.folder is None else str(resolved.folder)
    if resolved.name != point.name:
        check_checkpoint(args, kd, state, resolved, teacher)
