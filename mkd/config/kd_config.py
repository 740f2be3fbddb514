"""`KDConfig`: the checked options of knowledge distillation, and the list of their checks.

All that can be checked without reading a file is checked when a `KDConfig` is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mkd.config import checks
from mkd.config.kd_fields import TEACHER_SIZES, KDFields
from mkd.config.loss_spec import Divergence, LossSpec
from mkd.config.schedules import Schedule
from mkd.config.values import HiddenLossType, LayerPair

__all__ = [
    "FIELD_CHECKS",
    "Divergence",
    "FieldCheck",
    "HiddenLossType",
    "KDConfig",
    "LayerPair",
    "LossSpec",
    "Schedule",
]


@dataclass(frozen=True)
class FieldCheck:
    """A check of fields against each other."""

    fields: tuple[str, ...]
    """The fields to change where it fails."""
    run: Callable[[KDFields], None]
    """Raises MkdConfigError."""


def _numbers(*names: str) -> tuple[FieldCheck, ...]:
    return tuple(FieldCheck((name,), partial(checks.check_at_least_one, field=name)) for name in names)


_SIZES = tuple(f"teacher_{name}" for name in TEACHER_SIZES)

FIELD_CHECKS: tuple[FieldCheck, ...] = (
    FieldCheck(checks.SOURCES, checks.check_source),
    FieldCheck(("teacher_weights", "teachers_mode"), checks.check_teachers),
    FieldCheck(("hidden_loss",), checks.check_layers_of_one_teacher),
    FieldCheck(("cache_missing",), checks.check_cache_missing),
    FieldCheck(("hidden_loss", "teacher_dtype", "teacher_offload"), checks.check_cache),
    FieldCheck(
        (
            *checks.SERVED_FIELDS,
            *("hidden_loss", "xtoken_loss", "teacher_dtype"),
        ),
        checks.check_served,
    ),
    FieldCheck(("teacher_api", "cache_missing", "top_k", "temperature"), checks.check_inference_server),
    FieldCheck(("teacher_states_dir", "teacher_head_hf", "teacher_cache"), checks.check_states_of_server),
    FieldCheck(
        ("teacher_targets", "teacher_samples", "top_k", "top_k_tail", "temperature"), checks.check_served_targets
    ),
    FieldCheck(("ratio", "ratio_schedule"), checks.check_ratio),
    FieldCheck(("balance",), checks.check_balance),
    FieldCheck(("temperature", "temperature_schedule"), checks.check_temperature),
    FieldCheck(("loss", "beta", "skew", "z_loss"), checks.check_loss),
    FieldCheck(("beta", "skew"), checks.check_unused_parameters),
    FieldCheck(("z_loss",), checks.check_z_loss),
    FieldCheck(("hidden_loss", "hidden_loss_weight", "hidden_loss_type"), checks.check_hidden_loss),
    FieldCheck(("top_k", "top_k_tail"), checks.check_top_k),
    FieldCheck(("xtoken_loss", "projection", "teacher_seq_length"), checks.check_xtoken_loss),
    *(FieldCheck((name,), partial(checks.check_choice, field=name)) for name in checks.CHOICES),
    FieldCheck(("variable_seq_lengths",), checks.check_lengths),
    FieldCheck(("lora", "lora_modules"), checks.check_lora),
    *_numbers("packing_multiple", "loss_chunk_rows", "save_hf_interval", "save_hf_keep", "keep_last"),
    FieldCheck(("save_hf_keep",), checks.check_snapshots_kept),
    FieldCheck(("keep_best",), checks.check_keep_best),
    FieldCheck(("epochs",), checks.check_epochs),
    FieldCheck(("on_policy", "on_policy_schedule", *checks.ROLLOUT_FIELDS), checks.check_on_policy),
    *_numbers("compare_interval", "sample_tokens", "eval_tokens", "rollout_tokens", "rollout_samples", "rollout_steps"),
    *_numbers("rollout_refresh"),
    FieldCheck(("sample_tokens",), checks.check_samples),
    FieldCheck(("eval_tokens",), checks.check_eval_tokens),
    FieldCheck(("compare_interval",), checks.check_comparison),
    FieldCheck(("mlflow_uri",), checks.check_mlflow),
    FieldCheck(("teacher_micro_batch_size", "hidden_loss"), checks.check_teacher_passes),
    FieldCheck(("teacher_cuda_graph",), checks.check_teacher_graph),
    FieldCheck(("teacher_signals",), checks.check_teacher_signals),
    *_numbers(*_SIZES, "teacher_micro_batch_size"),
    *(FieldCheck((name,), partial(checks.check_teacher_size, field=name)) for name in _SIZES),
    *(FieldCheck((name,), partial(checks.check_bounds, field=name)) for name in checks.NUMBERS),
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
