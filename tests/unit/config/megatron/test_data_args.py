"""Flags of the data: files, weights of a blend, and shares of the splits."""

import pytest

from mkd.config import flags
from mkd.config.megatron.data_args import data_prefixes, dataset_config
from mkd.errors import MkdConfigError, MkdDataError
from tests.unit.config.megatron.checks.test_layouts import layout


@pytest.mark.parametrize("split", ["nan", "9e1,1,0", "99,-1,0", ""])
def test_shares_that_megatron_would_misread(split):
    args = flags.default_arguments()
    args.split, args.data_path, args.seq_length = split, ["prefix"], 8
    with pytest.raises(MkdConfigError, match="--split is"):
        dataset_config(args, None)


@pytest.mark.parametrize("flag", ["data_path", "valid_data_path"])
@pytest.mark.parametrize(
    ("weight", "rule"),
    [
        ("0", "a weight must be a finite number above 0"),
        ("-1", "a weight must be a finite number above 0"),
        ("nan", "a weight must be a finite number above 0"),
        ("inf", "a weight must be a finite number above 0"),
        ("1e-300", "its share is below 1e-09, so that it would not be read"),
    ],
)
def test_a_weight_of_a_blend_that_reads_nothing(flag: str, weight: str, rule: str) -> None:
    args = flags.default_arguments()
    setattr(args, flag, [weight, "A", "1", "B"])
    with pytest.raises(MkdConfigError, match=f"^A has the weight {float(weight):g} in its blend; {rule}"):
        data_prefixes(args)


@pytest.mark.parametrize(("share", "eval_iters", "needs_none"), [(1.0, 0, True), (0.5, 0, False), (1.0, 4, False)])
def test_a_run_that_reads_no_row_may_have_made_up_data(share: float, eval_iters: int, needs_none: bool) -> None:
    args = flags.default_arguments()
    args.kd_on_policy, args.eval_iters = share, eval_iters
    with pytest.raises(MkdDataError, match="no training data: give --data-path") as error:
        data_prefixes(args)
    assert ("--mock-data" in str(error.value)) == needs_none


def test_an_infinite_weight_is_named_not_those_beside_it() -> None:
    args = flags.default_arguments()
    args.data_path = ["1", "A", "inf", "B"]
    with pytest.raises(MkdConfigError, match=r"^B has the weight inf in its blend; a weight must be a finite number"):
        data_prefixes(args)


def test_equal_weights_of_any_size() -> None:
    args = flags.default_arguments()
    for weight in ("1e-30", "0.5", "1e30"):
        args.data_path = [weight, "A", weight, "B"]
        assert data_prefixes(args) == ["A", "B"]


def test_data_prefixes(tmp_path):
    blend, per_split = tmp_path / "blend", tmp_path / "per_split"
    blend.write_text("1 a 2 b")
    per_split.write_text('{"train": ["a"], "valid": "0.5 b 0.5 c", "test": null}')
    cases = [
        ({"data_path": ["a"]}, ["a"]),
        ({"data_path": ["a", "b"]}, ["a", "b"]),
        ({"data_path": ["0.3", "a", "0.7", "b"]}, ["a", "b"]),
        ({"train_data_path": ["a"], "valid_data_path": ["1", "b"]}, ["a", "b"]),
        ({"data_args_path": str(blend)}, ["a", "b"]),
        ({"per_split_data_args_path": str(per_split)}, ["a", "b", "c"]),
        ({"mock_data": True}, []),
    ]
    for changes, expected in cases:
        assert data_prefixes(layout(**changes)) == expected
    for changes in ({}, {"data_args_path": "nowhere"}):
        with pytest.raises(MkdDataError):
            data_prefixes(layout(**changes))
