"""Patches of Megatron's start: its dataset helpers and its help texts."""

import argparse
import re


def use_prebuilt_dataset_helpers() -> None:
    """Make `initialize_megatron` use the compiled dataset helpers in the wheel.

    megatron-core 0.19 calls `make` in the installed datasets folder at every start; the wheel has the compiled module
    but no Makefile, so rank 0 exits with status 1.
    """
    from megatron.core.datasets import utils

    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return  # a source checkout: megatron compiles
    utils.compile_helpers = lambda: None


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs in help texts that argparse cannot format.

    megatron-core 0.19 has help texts with a bare "%", which make `--help` end with a ValueError.
    """
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = re.sub(r"%%|%\(\w+\)[sdfr]|%", lambda m: "%%" if m[0] == "%" else m[0], action.help)
