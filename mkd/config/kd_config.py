"""`KDConfig`: the checked options of knowledge distillation, and the list of their checks.

All that can be checked without reading a file is checked when a `KDConfig` is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mkd.config.checks import losses, run, served_teachers, single_values, teachers, written_texts
from mkd.config.kd_fields import TEACHER_SIZES, KDFields


@dataclass(frozen=True)
class FieldCheck:
    """A check of fields against each other."""

    fields: tuple[str, ...]
    """The fields to change where it fails."""
    run: Callable[[KDFields], None]
    """Raises MkdConfigError."""


def _numbers(*names: str) -> tuple[FieldCheck, ...]:
    return tuple(FieldCheck((name,), partial(single_values.check_at_least_one, field=name)) for name in names)


_SIZES = tuple(f"teacher_{name}" for name in TEACHER_SIZES)

FIELD_CHECKS: tuple[FieldCheck, ...] = (
    FieldCheck(teachers.SOURCES, teachers.check_source),
    FieldCheck(("teacher_weights", "teachers_mode"), teachers.check_teachers),
    FieldCheck(("hidden_loss",), teachers.check_layers_of_one_teacher),
    FieldCheck(("cache_missing",), teachers.check_cache_missing),
    FieldCheck(("hidden_loss", "teacher_dtype", "teacher_offload"), teachers.check_cache),
    FieldCheck(
        (
            *served_teachers.SERVED_FIELDS,
            *("hidden_loss", "xtoken_loss", "teacher_dtype"),
        ),
        served_teachers.check_served,
    ),
    FieldCheck(("teacher_api", "cache_missing", "top_k", "temperature"), served_teachers.check_inference_server),
    FieldCheck(("teacher_states_dir", "teacher_head_hf", "teacher_cache"), served_teachers.check_states_of_server),
    FieldCheck(
        ("teacher_targets", "teacher_samples", "top_k", "top_k_tail", "temperature"),
        served_teachers.check_served_targets,
    ),
    FieldCheck(("ratio", "ratio_schedule"), losses.check_ratio),
    FieldCheck(("balance",), losses.check_balance),
    FieldCheck(("temperature", "temperature_schedule"), losses.check_temperature),
    FieldCheck(("loss", "beta", "skew", "z_loss"), losses.check_loss),
    FieldCheck(("beta", "skew"), losses.check_unused_parameters),
    FieldCheck(("z_loss",), losses.check_z_loss),
    FieldCheck(("hidden_loss", "hidden_loss_weight", "hidden_loss_type"), losses.check_hidden_loss),
    FieldCheck(("top_k", "top_k_tail"), losses.check_top_k),
    FieldCheck(("xtoken_loss", "projection", "teacher_seq_length"), losses.check_xtoken_loss),
    *(FieldCheck((name,), partial(single_values.check_choice, field=name)) for name in single_values.CHOICES),
    FieldCheck(("variable_seq_lengths",), run.check_lengths),
    FieldCheck(("lora", "lora_modules"), run.check_lora),
    *_numbers("packing_multiple", "loss_chunk_rows", "save_hf_interval", "save_hf_keep", "keep_last"),
    FieldCheck(("save_hf_keep",), run.check_snapshots_kept),
    FieldCheck(("keep_best",), run.check_keep_best),
    FieldCheck(("epochs",), run.check_epochs),
    FieldCheck(("on_policy", "on_policy_schedule", *written_texts.ROLLOUT_FIELDS), written_texts.check_on_policy),
    *_numbers("compare_interval", "sample_tokens", "eval_tokens", "rollout_tokens", "rollout_samples", "rollout_steps"),
    *_numbers("rollout_refresh"),
    FieldCheck(("sample_tokens",), written_texts.check_samples),
    FieldCheck(("eval_tokens",), written_texts.check_eval_tokens),
    FieldCheck(("compare_interval",), losses.check_comparison),
    FieldCheck(("mlflow_uri",), run.check_mlflow),
    FieldCheck(("teacher_micro_batch_size", "hidden_loss"), teachers.check_teacher_passes),
    FieldCheck(("teacher_cuda_graph",), teachers.check_teacher_graph),
    FieldCheck(("teacher_signals",), teachers.check_teacher_signals),
    *_numbers(*_SIZES, "teacher_micro_batch_size"),
    *(FieldCheck((name,), partial(teachers.check_teacher_size, field=name)) for name in _SIZES),
    *(FieldCheck((name,), partial(single_values.check_bounds, field=name)) for name in single_values.NUMBERS),
)
"""Checks of fields, in the order in which a job runs them."""


@dataclass(frozen=True, kw_only=True)
class KDConfig(KDFields):
    """Options of knowledge distillation: where the teacher comes from and what is learned from it.

    Raises:
        MkdConfigError: the first of `FIELD_CHECKS` that fails.
    """

    def __post_init__(self) -> None:
        for check in FIELD_CHECKS:
            check.run(self)
