"""The process that every other process of the tests is forked from.

Importing torch, megatron, transformers and mkd costs 6 s of CPU; forked processes have it done.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_server() -> ForkServerContext:
    """multiprocessing's context; the server starts with its first process and imports `tests.support.dist.preload`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.dist.preload"])
    return context
