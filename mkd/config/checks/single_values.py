"""Values of one field: choices and bounds."""

from typing import get_args

from mkd.config.bounds import BOUNDS, check_number
from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.values import (
    BadRecordsMode,
    CutOffMode,
    DataFormat,
    GuardMode,
    LogitsDtype,
    LossImplementation,
    Packing,
    SignalsMemory,
    require_choice,
)
from mkd.errors import MkdConfigError
from mkd.utils.logging import LogLevel

NUMBERS = tuple(name.removeprefix("kd_") for name in BOUNDS if name.startswith("kd_"))
"""Fields that are numbers with bounds."""

CHOICES = {
    "logits_dtype": get_args(LogitsDtype),
    "loss_impl": get_args(LossImplementation),
    "data_format": get_args(DataFormat),
    "bad_records": get_args(BadRecordsMode),
    "packing": get_args(Packing),
    "long_samples": ("split", "drop"),
    "mask": ("labels", "all"),
    "rollout_cut_off": get_args(CutOffMode),
    "rollout_guard": get_args(GuardMode),
    "log_level": get_args(LogLevel),
    "teacher_signals": get_args(SignalsMemory),
}
"""Field -> its values, for fields without other checks."""


def check_choice(kd: KDFields, field: str) -> None:
    """Refuse a value that is not among `CHOICES`."""
    require_choice(flag_of(field), getattr(kd, field), CHOICES[field])


def check_at_least_one(kd: KDFields, field: str) -> None:
    """Refuse a number below 1."""
    value = getattr(kd, field)
    if value is not None and value < 1:
        raise MkdConfigError(f"{flag_of(field)} is {value}; it must be at least 1")


def check_bounds(kd: KDFields, field: str) -> None:
    """Refuse a number outside the bounds of `mkd.config.bounds`."""
    value = getattr(kd, field)
    for number in value if isinstance(value, list) else [value]:
        if number is not None:
            check_number(flag_of(field), f"kd_{field}", number)
