"""Work that megatron repeats in tests is done once. Commands in processes of their own do all of it."""

import functools

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training.argument_utils import ArgumentGroupFactory


def make_quick() -> None:
    """In this process and its forks."""
    _remember_help_texts()
    # The first save of a process starts a manager process; a fresh Python for it takes 3 s of CPU.
    filesystem_async.get_write_results_queue = functools.partial(filesystem_async.get_write_results_queue, "fork")


def _remember_help_texts() -> None:
    """Megatron parses the source of its dataclasses for every parser: 0.3 of the 0.4 s that a parser takes."""
    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def remembered(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(factory, config)
        return known[config]

    ArgumentGroupFactory._get_field_docstrings = remembered
