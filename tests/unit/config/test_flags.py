"""Flags of a command line: parsed, named in every spelling, and refused where they contradict distillation."""

import sys
from contextlib import suppress

import pytest

from mkd.config.flags import flag_parser, flags_given, parse_command_line, refuse_contradictions
from mkd.errors import MkdConfigError


def test_flags_given_finds_every_spelling():
    argv = ["--hidden-size", "8", "--lr=0.1", "--kd-ratio", "0.5", "--disable-bias-linear", "--hidden-sizes", "hidden"]
    assert flags_given(argv) == {
        "hidden_size": "--hidden-size",
        "lr": "--lr",
        "kd_ratio": "--kd-ratio",
        "add_bias_linear": "--disable-bias-linear",
    }
    assert flags_given([]) == {}


def test_flags_given_reads_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_kd.py", "--num-layers", "3"])
    assert flags_given() == {"num_layers": "--num-layers"}


def test_parse_command_line(monkeypatch):
    words = "--kd-teacher-hf T --kd-ratio 0.25 --kd-temperature 2 --kd-no-temperature-squared --hidden-size 8"
    monkeypatch.setattr(sys, "argv", ["pretrain_kd.py", *words.split()])
    args, kd = parse_command_line()
    assert (kd.teacher_hf, kd.ratio, kd.temperature, kd.temperature_squared) == (["T"], 0.25, 2.0, False)
    assert (kd.student_hf, kd.loss, kd.teacher_offload, kd.dry_run) == (None, "forward_kl", False, False)
    assert args.hidden_size == 8


@pytest.mark.parametrize(
    ("words", "loss"), [("--kd-xtoken-loss", "partition_kl"), ("--kd-xtoken-loss gold", "gold"), ("", None)]
)
def test_the_flag_for_other_tokenizers_may_name_the_loss(monkeypatch, words, loss):
    monkeypatch.setattr(sys, "argv", f"x --kd-teacher-hf T --kd-ratio 0.5 {words} --hidden-size 8".split())
    assert parse_command_line()[1].xtoken_loss == loss


@pytest.mark.parametrize("words", [["--kd-ratio"], ["--kd-loss", "kl"], ["--kd-loss-chunk-rows", "1.5"], ["stray"]])
def test_what_the_parser_refuses_is_one_line(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["x", *words])
    with pytest.raises(MkdConfigError) as caught:
        parse_command_line()
    assert words[0] in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_contradictions_need_the_whole_beginning():
    refuse_contradictions(["--logits", "--export-k", "value", "--load", "freeze-all-layers"])
    for words in (["--spec", "my.layers", "spec"], ["--spec=my.layers"]):
        with pytest.raises(MkdConfigError, match=r"--spec my\.layers is not supported: leave it out"):
            refuse_contradictions(words)
    with pytest.raises(MkdConfigError, match="--freeze-all-layers contradicts"):
        refuse_contradictions(["--load", "x", "--freeze-all-layers"])


def test_a_value_that_no_flag_has_is_an_error_of_one_line() -> None:
    """Whatever the flag: no KeyError from a lookup."""
    parser = flag_parser()
    for flag, action in parser._option_string_actions.items():
        if action.nargs != 0:
            with suppress(MkdConfigError):  # anything else is raised
                parser.parse_known_args([flag, "zzz"])
    with pytest.raises(MkdConfigError, match=r"--attention-backend: invalid choice: 'zzz' \(choose from flash, "):
        parser.parse_known_args(["--attention-backend", "zzz"])
