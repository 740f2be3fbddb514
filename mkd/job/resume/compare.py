"""Compares model, frozen weights, teacher and objective of a checkpoint with those of a job."""

from argparse import Namespace
from dataclasses import asdict

from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.resume_point import ResumePoint, changed_settings, check_same_job, check_teacher
from mkd.checkpoint.source import TeacherSource
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.checks.batches import check_batches_grow
from mkd.config.megatron.epochs import iterations_are_unknown
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.job.resume.optimizer import (
    check_optimizer_layout,
    check_same_optimizer,
    check_stored_schedule,
    left_out_state,
)

_TRAINING = (
    *("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_layernorm", "moe_router_bias_update_rate"),
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
    notes += left_out_state(args, point)
    before = RunState.read_from(stored)
    state.unfinished_evaluation, state.balance_factor = before.unfinished_evaluation, before.balance_factor
    state.rollout, state.runaway_rollouts = before.rollout, before.runaway_rollouts
    if kd.is_plain_pretraining:
        state.teacher_fingerprint, note = before.teacher_fingerprint, None
    else:
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
