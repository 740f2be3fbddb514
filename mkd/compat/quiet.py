"""What megatron prints about itself, left out (tests/unit/compat/test_quiet.py).

megatron-core 0.19 prints about a thousand lines before the first step, most of them without a way to ask for less: its
800 arguments, each parameter of the model, what it deprecates of itself, the time at each stage of its start, and an
estimate of memory that knows no teacher. What it says about a run of its own accord, and any warning that is not
listed here, stays.
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
    # Arguments and the order of its start.
    r"using world size:|Number of virtual stages|using torch\.\w+ for parameters|accumulate and all-reduce gradients",
    r"setting (training iterations|global batch size)|> (initializ|setting random|compiling|padded vocab)",
    r">>> done with dataset index|torch distributed is already|model parallel is already|time to initialize megatron",
    r"\[(after|before) .*\] datetime| > number of parameters on|> building train| > datasets target sizes",
    r"    (train|validation|test): +\d+$|done with setup|training \.\.\.$|Overwriting rerun_state_machine",
    # A package of NVIDIA's own, which is looked for whether or not it is asked for.
    r"WARNING: one_logger package is required",
    # What mkd's own lines say of evaluations and of checkpoints.
    r"Evaluating (on|iter) \d|sharded_state_dict metadata loaded| checkpoint version \d",
    r"Setting \w+ to .* from checkpoint|Checkpoint did not provide arguments",
)
"""How lines begin that megatron prints, each as a regular expression."""

MEMORY = r"\[Rank \d+\] \(.*\) memory \(MB\)"
"""A line of each rank after two steps and around each checkpoint, and where --log-memory-interval asks for it."""

LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",  # in favor of one with Mamba layers
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",  # also of other saves
    "megatron.core.rerun_state_machine": r"RerunStateMachine initialized|Setting RerunStateMachine mode|Result validat",
    "megatron.core.datasets.blended_dataset": "Building a BlendedDataset for a single",
}
"""Logger -> how its messages begin that are warnings by their level only."""

WARNED: tuple[dict[str, Any], ...] = (
    {"category": DeprecationWarning, "module": r"(megatron|torch|transformer_engine)\b"},
    {"category": FutureWarning, "module": r"(megatron|torch|transformer_engine)\b"},
    {"category": UserWarning, "module": r"torch\.distributed\.checkpoint\b"},
    {"category": FutureWarning, "message": "Please use DTensor instead"},  # said of whoever calls torch
    {"message": "Transformer Engine and Apex are not installed"},
)
"""Python's warnings: arguments of `warnings.filterwarnings`."""


def silence_megatron(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Leave out what megatron prints about itself. This imports megatron: the CPU backend must be in place.

    Args:
        argv: the command line, not parsed yet. With --kd-verbose nothing is left out, and what further flags ask for
            (--logging-level, --timing-log-level, --log-memory-interval) stays.
        environ: MEGATRON_LOGGING_LEVEL is the same as the flag.
    """
    given = {word.split("=")[0] for word in argv}
    if "--kd-verbose" in given:
        return
    if not sys.warnoptions:  # else Python was told on its own command line, or by PYTHONWARNINGS
        for options in WARNED:
            warnings.filterwarnings("ignore", **options)

    from megatron.training import arguments, checkpointing, global_vars, initialize, training
    from megatron.training.models import dist_utils
    from megatron.training.utils import common_utils

    if "--logging-level" not in given and "MEGATRON_LOGGING_LEVEL" not in environ:
        logging.getLogger().setLevel(logging.WARNING)  # megatron has set it to INFO when it was imported
    if "--timing-log-level" in given:
        logging.getLogger("megatron.core.timers").setLevel(logging.INFO)
    for name, beginning in LOGGED.items():
        logging.getLogger(name).addFilter(_Without(beginning))

    beginnings = PRINTED if "--log-memory-interval" in given else (*PRINTED, MEMORY)
    unwanted = re.compile("|".join(beginnings))

    def print_the_rest(*values: Any, **options: Any) -> None:
        if not unwanted.match(" ".join(map(str, values))):
            builtins.print(*values, **options)

    for module in (arguments, checkpointing, common_utils, dist_utils, global_vars, initialize, training):
        module.print = print_the_rest
    arguments._print_args = lambda title, args: None
    training.report_theoretical_memory = lambda *args, **kwargs: None


class _Without(logging.Filter):
    """Drops messages that begin like this."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = re.compile(beginning)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._beginning.match(record.getMessage())
