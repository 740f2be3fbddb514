"""For tools that run without a GPU: what importing megatron says there, which tells their users nothing."""

import logging
import warnings

_LOGGER = "torch.utils.cpp_extension"
"""megatron.core.tensor_parallel.random imports it at its top, and it looks for CUDA's compiler when it is imported."""


def import_quietly() -> None:
    """Before the first import of megatron: no word of an absent Transformer Engine, Apex or CUDA runtime."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    logging.getLogger(_LOGGER).addFilter(lambda record: not record.getMessage().startswith("No CUDA runtime is found"))
