"""Flags that every run needs, and lengths and intervals that are refused."""

from argparse import Namespace

import pytest

from mkd.config.megatron.checks.run_length import REQUIRED, check_alternatives, check_intervals, check_required
from mkd.config.megatron.epochs import UNKNOWN_ITERATIONS
from mkd.errors import MkdConfigError
from tests.unit.config.megatron.checks.test_layouts import layout
from tests.unit.config.megatron.checks.test_written_texts import arguments


def test_the_list_of_required_flags():
    assert list(REQUIRED) == [
        *("--num-layers", "--seq-length", "--micro-batch-size", "--train-iters", "--lr", "--eval-interval"),
    ]


@pytest.mark.parametrize("name", ["num_layers", "seq_length", "micro_batch_size", "train_iters", "lr", "eval_interval"])
def test_required_flags(name):
    args = layout(train_iters=3, lr=0.1, eval_interval=2)
    flag = f"--{name.replace('_', '-')}"
    check_required(args, flag)
    setattr(args, name, None)
    with pytest.raises(MkdConfigError, match=f"{flag} is missing"):
        check_required(args, flag)


def test_the_first_missing_flag_names_the_others_too():
    args = layout(train_iters=None, lr=None, eval_interval=2, seq_length=None)
    found = []
    for flag in ("--seq-length", "--train-iters", "--lr"):
        with pytest.raises(MkdConfigError) as caught:
            check_required(args, flag)
        found.append(str(caught.value))
    assert found[0] == "--seq-length is missing (tokens per row); also missing: --train-iters, --lr"
    assert [message.count("missing") for message in found[1:]] == [1, 1]


LENGTHS = dict(train_iters=3, train_samples=None, lr_decay_iters=None, lr_decay_samples=None)

LENGTHS |= dict(lr_warmup_iters=0, lr_warmup_samples=0)

SOURCES = dict(
    bf16=False,
    fp16=False,
    mock_data=False,
    data_path=["a"],
    train_data_path=None,
    valid_data_path=None,
    test_data_path=None,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_samples": 12},
            "--train-samples 12 and --train-iters 3: lengths are all in iterations or all in samples",
        ),
        ({"lr_warmup_samples": 4}, "--lr-warmup-samples 4 and --train-iters 3"),
        ({"train_iters": None, "train_samples": 12, "lr_decay_iters": 2}, "--lr-decay-iters 2 and --train-samples 12"),
        (
            {"train_iters": UNKNOWN_ITERATIONS, "lr_warmup_samples": 4},
            "--lr-warmup-samples 4 and --kd-epochs, which sets --train-iters: lengths",
        ),
        ({"bf16": True, "fp16": True}, "--bf16 and --fp16 both set the precision: give one of them"),
        ({"mock_data": True}, "--mock-data and --data-path are two sources of data"),
        ({"train_data_path": ["a"], "valid_data_path": ["b"]}, "--data-path and --train-data-path are two sources"),
    ],
)
def test_alternatives_are_refused_by_name(changes: dict, message: str) -> None:
    check_alternatives(Namespace(**LENGTHS, **SOURCES))
    check_alternatives(Namespace(**{**LENGTHS, **SOURCES, "train_iters": None, "train_samples": 12}))
    with pytest.raises(MkdConfigError, match=message):
        check_alternatives(Namespace(**{**LENGTHS, **SOURCES, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_iters": -1}, "--eval-iters is -1; it must be at least 0, which never evaluates"),
        ({"eval_interval": 0}, "--eval-interval is 0; it must be at least 1"),
        ({"log_interval": 0}, "--log-interval is 0; it must be at least 1"),
        ({"tensorboard_log_interval": 0}, "--tensorboard-log-interval is 0; it must be at least 1"),
        ({"train_iters": -5}, "--train-iters is -5; it must be at least 1"),
        ({"train_samples": -5}, "--train-samples is -5; it must be at least 1"),
        ({"save_interval": -1}, "--save-interval is -1; it must be at least 1"),
        ({"save": "S"}, "--save S needs --save-interval"),
    ],
)
def test_intervals(changes: dict, words: str) -> None:
    check_intervals(arguments())
    with pytest.raises(MkdConfigError) as caught:
        check_intervals(arguments(**changes))
    assert str(caught.value).startswith(words)
