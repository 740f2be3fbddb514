"""Runs Megatron from the wheel on CPU with gloo, as if the process had one CUDA device.

Megatron has no CPU backend: it uses the device "cuda" and `torch.cuda` throughout. Importing this package changes
nothing; `activate()` redirects those calls for the lifetime of the process, and must run before megatron is imported.
No other package checks for a GPU, except that `mkd launch` counts those of its node (`mkd.distributed.node_gpus`).
"""

import logging
import os
import sys
import warnings
from typing import Any

import torch

from mkd.errors import MkdConfigError

DEVICE_VARIABLE = "MKD_DEVICE"
_CUDA = torch.device("cuda")
"""Created before the redirect, which would replace it by the CPU."""
_stands_in = False
_capability: tuple[int, int] | None = None
"""Compute capability of the GPUs that this process stands in for; None if it is unknown."""


def wanted() -> bool:
    """True if this process should run on CPU: there is no CUDA device, or `MKD_DEVICE=cpu` is set.

    Raises:
        MkdConfigError: `MKD_DEVICE` is neither `cpu` nor `cuda`, or is `cuda` on a machine without a CUDA device.
    """
    choice = os.environ.get(DEVICE_VARIABLE, "").lower()
    if choice not in ("", "cpu", "cuda"):
        raise MkdConfigError(f"{DEVICE_VARIABLE} is {choice!r}; legal values are cpu and cuda")
    if choice:
        if choice == "cuda" and not torch.cuda.is_available():
            raise MkdConfigError(f"{DEVICE_VARIABLE} is cuda, but torch finds no CUDA device")
        return choice == "cpu"
    return not torch.cuda.is_available()


def is_active() -> bool:
    """True if `activate` has run in this process."""
    from mkd.cpu import device_mode

    return device_mode.is_entered()


def is_target() -> bool:
    """True if the job of this command line trains on CPU, so that flags get their values for CPU."""
    return is_active() and not _stands_in


def target_device() -> torch.device:
    """Device of the job's tensors."""
    return torch.device("cpu") if is_target() else _CUDA


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of the GPUs of this command line's job; None on CPU, and where it is unknown."""
    if is_target():
        return None
    if _stands_in:
        return _capability
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _uncompiled(function: Any = None, **options: Any) -> Any:
    """`torch.compile`, as a function or a decorator with options, without compilation."""
    return function if function is not None else lambda decorated: decorated


def activate(stands_in: bool = False, capability: tuple[int, int] | None = None) -> None:
    """Redirect CUDA to CPU and NCCL to gloo in this process. Calling it again does nothing.

    Args:
        stands_in: the job itself will run on GPUs; this process only examines its command line, and keeps its flags.
        capability: compute capability of those GPUs, if it is known.
    """
    import torch._dynamo  # registers torch.cuda's functions by identity, so it must see the originals

    from mkd.cpu import cuda_stubs, device_mode, gloo

    if is_active():
        return
    # Megatron warns a dozen times about missing GPU packages, and torch about memory that is not pinned.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
    # Megatron slices the parameters of gated delta nets for context parallelism with a list.
    warnings.filterwarnings("ignore", message="Using a non-tuple sequence for multidimensional indexing")
    # With dropout: here both kinds of random states are those of the CPU.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    global _stands_in, _capability
    _stands_in, _capability = stands_in, capability
    if stands_in:  # its environment is inherited by the jobs for GPUs that it starts, and stays as it is
        torch.compile = _uncompiled  # nothing is computed here, and the compiler takes a second to import
    else:
        # jit_fuser compiles through the CUDA stream API; eager is also faster to start.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # Megatron requires it under tensor parallelism, for the order of CUDA kernels.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Megatron uses layers of an installed Transformer Engine, which need CUDA, even beside its own (final norm).
        sys.modules["transformer_engine"] = None
    cuda_stubs.install(capability or cuda_stubs.CAPABILITY)
    gloo.install()
    device_mode.enter()

    from mkd.cpu import (
        attention,
        biased_experts,
        latent_attention,
        norms,
    )  # they import megatron, which all of the above must precede

    attention.install()
    biased_experts.install()
    latent_attention.install()
    norms.install()
