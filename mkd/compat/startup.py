"""Patches of Megatron's start: its dataset helpers, its warm-up, and the help texts and types of its flags."""

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any


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


def skip_warm_up() -> None:
    """Compile functions when the model calls them first, and not before.

    megatron-core 0.19 calls three compiled functions before it builds the model, in ways in which no model calls them:
    activations with gradients enabled, which models compute inside of autograd functions, and a bias that has been
    expanded. Each call of the model compiles again. The default random states stay those of --seed.
    """
    import torch
    from megatron.training import initialize

    def free_memory(tp_size: int | None = None) -> None:
        torch.cuda.empty_cache()  # the end of the warm-up; here, the memory of the check of the teacher

    initialize._warmup_jit_function = free_memory


def read_help_texts_once() -> None:
    """Read the help texts of Megatron's flags for the first parser of the process only.

    megatron-core 0.19 parses the source of its dataclasses for every parser, which is most of the time that a parser
    takes. A job has four of them.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def read_once(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(factory, config)
        return known[config]

    ArgumentGroupFactory._get_field_docstrings = read_once


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs in help texts that argparse cannot format.

    megatron-core 0.19 has help texts with a bare "%", which make `--help` end with a ValueError.
    """
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = re.sub(r"%%|%\(\w+\)[sdfr]|%", lambda m: "%%" if m[0] == "%" else m[0], action.help)


def repair_types(parser: argparse.ArgumentParser) -> None:
    """Make a wrong name of an enumeration's member an error of the parser.

    megatron-core 0.19 looks members up by name; a wrong one, as in `--attention-backend none`, ends in a KeyError.
    """
    for action in parser._actions:
        if action.type is not None and not isinstance(action.type, type):
            action.type = _refuse_unknown(
                action.type, [getattr(choice, "name", choice) for choice in action.choices or ()]
            )


def _refuse_unknown(convert: Callable[[str], Any], choices: list[str]) -> Callable[[str], Any]:
    @functools.wraps(convert)
    def converted(text: str) -> Any:
        try:
            return convert(text)
        except KeyError:
            listed = f" (choose from {', '.join(choices)})" if choices else ""
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r}{listed}") from None

    return converted
