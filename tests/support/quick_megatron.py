"""Work that megatron repeats in tests is done once. Commands in processes of their own do all of it."""

from mkd.compat.checkpoints import end_result_queues_with_their_rank
from mkd.compat.startup import read_help_texts_once


def make_quick() -> None:
    """In this process and its forks."""
    read_help_texts_once()
    # The first save of a process starts a manager process; a fresh Python for it takes 3 s of CPU.
    end_result_queues_with_their_rank("fork")
