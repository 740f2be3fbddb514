"""Architectures that Megatron's arguments adopt."""

import sys
from argparse import Namespace
from contextlib import nullcontext

import pytest

from mkd.config.flags import parse_command_line
from mkd.config.megatron.architecture import adopt_architecture
from mkd.errors import MkdConfigError

ARCHITECTURE = {"hidden_size": 32, "normalization": "RMSNorm", "hidden_dropout": 0.0, "rotary_base": 10000}


def parsed(monkeypatch: pytest.MonkeyPatch, *words: object) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["x", "--kd-teacher-hf", "T", "--kd-ratio", "0.5", *map(str, words)])
    return parse_command_line()[0]


@pytest.mark.parametrize("words", [[], ["--hidden-size", 32], ["--rotary-base", 10000, "--normalization=RMSNorm"]])
def test_adopt_architecture_sets_what_the_folder_says(monkeypatch, words):
    args = parsed(monkeypatch, *words)
    adopt_architecture(args, ARCHITECTURE, "--kd-student-hf S")
    assert {name: getattr(args, name) for name in ARCHITECTURE} == ARCHITECTURE


@pytest.mark.parametrize(
    "words, message",
    [
        (["--hidden-size", 64], "--hidden-size is 64, but --kd-student-hf S has 32"),
        (["--normalization=LayerNorm"], "--normalization is LayerNorm, but --kd-student-hf S has RMSNorm"),
        (["--rotary-base", 500000], "--rotary-base is 500000, but --kd-student-hf S has 10000"),
    ],
)
def test_adopt_architecture_refuses_a_contradiction(monkeypatch, words, message):
    args = parsed(monkeypatch, *words)
    with pytest.raises(MkdConfigError, match=message):
        adopt_architecture(args, ARCHITECTURE, "--kd-student-hf S")


HEADS = {"num_attention_heads": 4, "group_query_attention": False, "num_query_groups": None}

GROUPS = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}


@pytest.mark.parametrize(
    "words, architecture, message",
    [
        (["--group-query-attention", "--num-query-groups", 4], HEADS, None),
        (["--num-query-groups", 4], HEADS, None),
        (["--num-query-groups", 2], HEADS, "--num-query-groups is 2, but S has None"),
        (["--group-query-attention"], HEADS, "--group-query-attention is True, but S has False"),
        (["--group-query-attention"], GROUPS, None),
        (["--group-query-attention", "--num-query-groups", 2], GROUPS, None),
        (["--group-query-attention", "--num-query-groups", 4], GROUPS, "--num-query-groups is 4, but S has 2"),
    ],
)
def test_key_value_heads_in_every_spelling(monkeypatch, words, architecture, message):
    args = parsed(monkeypatch, *words)
    with pytest.raises(MkdConfigError, match=message) if message else nullcontext():
        adopt_architecture(args, architecture, "S")
        assert {name: getattr(args, name) for name in architecture} == architecture


def test_dropout_is_the_choice_of_the_run(monkeypatch):
    args = parsed(monkeypatch, "--hidden-dropout", 0.1)
    adopt_architecture(args, ARCHITECTURE, "--kd-student-hf S")
    assert args.hidden_dropout == 0.1
