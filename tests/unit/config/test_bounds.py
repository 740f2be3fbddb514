"""Every numeric flag has bounds with a reason, or is listed as one of which any value means something."""

import math
from argparse import Action
from functools import cache

import pytest

from mkd.config.bounds import BOUNDS, WITHOUT_BOUNDS, Bounds, check_given, check_number, is_numeric
from mkd.config.flags import flag_parser
from mkd.config.kd_config import KDConfig
from mkd.config.loss_spec import LossSpec
from mkd.errors import MkdConfigError


@cache
def numeric_flags() -> dict[str, Action]:
    """Megatron's and mkd's numeric flags, by the names of their arguments."""
    return {action.dest: action for action in flag_parser()._actions if is_numeric(action)}


def numbers_of(value: object) -> list[float]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, int | float) and not isinstance(part, bool)]


def test_each_numeric_flag_has_bounds_or_a_reason_for_none() -> None:
    listed = " ".join(WITHOUT_BOUNDS.values()).split()
    assert len(listed) == len(set(listed))
    assert sorted(numeric_flags().keys() - BOUNDS.keys() - set(listed)) == []
    assert sorted(BOUNDS.keys() & set(listed)) == []


def test_each_entry_is_a_flag() -> None:
    unknown = (BOUNDS.keys() | set(" ".join(WITHOUT_BOUNDS.values()).split())) - numeric_flags().keys()
    assert sorted(unknown) == []


@pytest.mark.parametrize("name", BOUNDS)
def test_default_is_legal_and_bounds_are_ordered(name: str) -> None:
    bounds, default = BOUNDS[name], numeric_flags()[name].default
    assert bounds.low < bounds.high and bounds.reason
    for value in numbers_of(default):
        check_number("--flag", name, value)


def test_each_number_outside_is_refused() -> None:
    """All flags at once: below, above, NaN and the infinities, as the command line gives them."""
    parser = flag_parser()
    actions = [action for action in parser._actions if not action.dest.startswith("kd_")]
    for name, action in numeric_flags().items():
        bounds = BOUNDS.get(name)
        values = [] if bounds is None else [str(action.type(bounds.low) - 1), str(action.type(bounds.high) * 2)]
        values += ["nan", "inf", "-inf"] if action.type is float else []
        flag = max(action.option_strings, key=len)
        for value in values:
            if action.choices is not None or action.dest.startswith("kd_"):
                continue
            count = action.nargs if isinstance(action.nargs, int) else 1
            words = [f"{flag}={value}"] if count == 1 and action.nargs is None else [flag, *[value] * count]
            if value.startswith("-") and len(words) > 1:
                continue  # argparse takes a negative number for a flag's value only behind "="
            args, _ = parser.parse_known_args(words)
            with pytest.raises(MkdConfigError, match=f"^{flag} is "):
                check_given(actions, args, words)


@pytest.mark.parametrize(
    "words",
    [
        ["--lr=1e38"],
        ["--weight-decay", "nan"],
        ["--adam-eps", "inf"],
        ["--adam-eps", "0"],
        ["--train-iters", "1" + 30 * "0"],
        ["--num-workers", "999999"],
        ["--hidden-size", "-8"],
        ["--rampup-batch-size", "8", "8", "1" + 30 * "0"],
        ["--moe-aux-loss-coeff", "0.1", "nan"],
        ["--train-iters", 400 * "9"],
    ],
)
def test_slips(words: list[str]) -> None:
    parser = flag_parser()
    args, _ = parser.parse_known_args(words)
    with pytest.raises(MkdConfigError) as error:
        check_given(parser._actions, args, words)
    message, flag = str(error.value), words[0].split("=")[0]
    assert message.startswith(f"{flag} is ") and "it must be" in message and len(message) < 200


def test_numbers_that_are_not_given_are_not_checked() -> None:
    parser = flag_parser()
    args, _ = parser.parse_known_args(["--lr", "1e-3"])
    args.weight_decay = math.nan
    check_given(parser._actions, args, ["--lr", "1e-3"])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e300},
        {"temperature": 1000.5},
        {"temperature": 0.001},
        {"temperature_schedule": "linear:4:2000:10"},
        {"z_loss": 1e20},
        {"hidden_loss": "1:1", "hidden_loss_weight": 1e30},
        {"top_k": 10**12},
        {"loss_chunk_rows": 10**12},
        {"packing_multiple": 10**12},
        {"compare_interval": 10**30},
        {"teacher_tensor_model_parallel_size": 10**30},
        {"teacher_weights": [0.5, 1e30], "teacher_hf": ["A", "B"]},
    ],
)
def test_refused_fields(changes: dict) -> None:
    (*_, name) = (name for name in changes if name != "teacher_hf")
    with pytest.raises(MkdConfigError, match=rf"--kd-{name.replace('_', '-')} (is|are) "):
        KDConfig(**{"teacher_hf": ["T"], "ratio": 0.5, **changes})


def test_extreme_legal_temperatures() -> None:
    for temperature in (0.01, 1000.0):
        assert LossSpec(temperature=temperature).temperature == temperature
    with pytest.raises(MkdConfigError, match=r"at least 0\.01 and at most 1000"):
        LossSpec(temperature=1e4)


def test_open_ends() -> None:
    bounds = Bounds(0.0, 1.0, "", without_low=True, without_high=True)
    assert 0.5 in bounds and 0.0 not in bounds and 1.0 not in bounds and math.nan not in bounds
    assert str(bounds) == "above 0 and below 1"
