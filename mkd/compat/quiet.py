"""Drops the lines that Megatron prints about itself.

megatron-core 0.19 prints about a thousand lines before the first step, most of them without an option to reduce them:
its 800 arguments, each parameter of the model, its own deprecations, the time of each stage of its start, and an
estimate of memory without the teacher. Lines about the run, and any warning that is not listed here, stay.
"""

import builtins
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

PRINTED = (
    # Arguments and stages of the start.
    r"using world size:|Number of virtual stages|using torch\.\w+ for parameters|accumulate and all-reduce gradients",
    r"setting (training iterations|global batch size)|> (initializ|setting random|compiling|padded vocab)",
    r">>> done with dataset index|torch distributed is already|model parallel is already|time to initialize megatron",
    r"\[(after|before) .*\] datetime| > number of parameters on|> building train| > datasets target sizes",
    r"    (train|validation|test): +\d+$|done with setup|training \.\.\.$|Overwriting rerun_state_machine",
    # An internal package of NVIDIA, which is imported with or without its flag.
    r"WARNING: one_logger package is required",
    # Evaluations and checkpoints, which mkd reports in lines of its own.
    r"Evaluating (on|iter) \d|sharded_state_dict metadata loaded| checkpoint version \d",
    r"Setting \w+ to .* from checkpoint|Checkpoint did not provide arguments",
    # The first start of a job that restarts itself. The plan names the source of the weights; any other --load without
    # a checkpoint is refused.
    r"WARNING: could not find the metadata file| +will not load any checkpoints and will start from random",
)
"""Beginnings of lines that megatron prints, as regular expressions."""

MEMORY = r"\[Rank \d+\] \(.*\) memory \(MB\)"
"""A line per rank after two steps, around each checkpoint, and every --log-memory-interval iterations."""

LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",  # in favor of one with Mamba layers
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",  # also of other saves
    "megatron.core.rerun_state_machine": r"RerunStateMachine initialized|Setting RerunStateMachine mode|Result validat",
    "megatron.core.datasets.blended_dataset": "Building a BlendedDataset for a single",
}
"""Logger -> beginnings of its messages that are warnings by level only, as a regular expression."""

WARNED: tuple[dict[str, Any], ...] = (
    {"category": DeprecationWarning, "module": r"(megatron|torch|transformer_engine)\b"},
    {"category": FutureWarning, "module": r"(megatron|torch|transformer_engine)\b"},
    {"category": UserWarning, "module": r"torch\.distributed\.checkpoint\b"},
    {"category": FutureWarning, "message": "Please use DTensor instead"},  # attributed to the caller of torch
    # Absent packages: mkd doctor lists them, and checks refuse flags that need them. Every rank would print these.
    {"message": "Transformer Engine and Apex are not installed"},
    {"message": "Apex is not installed. Falling back"},
    {"message": "Only transformer-engine>=.* supports MoE experts, but your version is 0.0.0"},
    {"message": "Detected a Jax installation but could not find", "category": RuntimeWarning},
    # Where megatron's files are compiled at each start, because their folder cannot be written.
    {"category": SyntaxWarning, "module": r".*\bmegatron\b"},
)
"""Python's warnings: arguments of `warnings.filterwarnings`."""


def silence_megatron(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Drop the lines that megatron prints about itself. This imports megatron: the CPU backend must be in place.

    Args:
        argv: the command line, not parsed yet. With --kd-verbose nothing is dropped; output that --logging-level,
            --timing-log-level or --log-memory-interval enables stays.
        environ: MEGATRON_LOGGING_LEVEL is equivalent to --logging-level.
    """
    given = {word.split("=")[0] for word in argv}
    if "--kd-verbose" in given:
        return
    if not sys.warnoptions:  # else the user has configured warnings: python -W, PYTHONWARNINGS
        for options in WARNED:
            warnings.filterwarnings("ignore", **options)

    from megatron.training import arguments, checkpointing, global_vars, initialize, training
    from megatron.training.models import dist_utils
    from megatron.training.utils import common_utils

    if "--logging-level" not in given and "MEGATRON_LOGGING_LEVEL" not in environ:
        logging.getLogger().setLevel(logging.WARNING)  # importing megatron has set it to INFO
    if "--timing-log-level" in given:
        logging.getLogger("megatron.core.timers").setLevel(logging.INFO)
    for name, beginning in LOGGED.items():
        logging.getLogger(name).addFilter(_Without(beginning))

    beginnings = PRINTED if "--log-memory-interval" in given else (*PRINTED, MEMORY)
    unwanted = re.compile("|".join(beginnings))

    def print_filtered(*values: Any, **options: Any) -> None:
        if not unwanted.match(" ".join(map(str, values))):
            builtins.print(*values, **options)

    for module in (arguments, checkpointing, common_utils, dist_utils, global_vars, initialize, training):
        module.print = print_filtered
    arguments._print_args = lambda title, args: None
    training.report_theoretical_memory = lambda *args, **kwargs: None


def import_quietly() -> None:
    """Drop the warnings about absent packages and CUDA runtimes, in tools that run without a GPU. Call it before
    megatron is imported."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    # megatron.core.tensor_parallel.random imports this module, which searches for CUDA's compiler.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_Without("No CUDA runtime is found"))


class _Without(logging.Filter):
    """Drops messages with a beginning that matches."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = re.compile(beginning)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._beginning.match(record.getMessage())
