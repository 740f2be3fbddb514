"""The one place that selects the kernels: Triton on a GPU, eager torch elsewhere."""

import importlib.util
import os
from functools import cache

import torch

from mkd.losses.kernels.interface import Kernels
from mkd.losses.kernels.sparse import SparseKernels


def resolve(implementation: str, device: torch.device, dtype: torch.dtype) -> str:
    """`auto` -> triton on a GPU and eager elsewhere; any other name is returned if it can run.

    Args:
        implementation: auto, eager or triton.
        device, dtype: of the hidden states or logits.

    Raises:
        ValueError: an unknown name, or Triton where it cannot run.
    """
    if implementation == "auto":
        return "triton" if device.type != "cpu" and _triton_obstacle(device, dtype) is None else "eager"
    if implementation not in ("eager", "triton"):
        raise ValueError(f"implementation is {implementation!r}; known are auto, eager and triton")
    if implementation == "triton" and (reason := _triton_obstacle(device, dtype)) is not None:
        raise ValueError(f"the loss cannot run in Triton: {reason}; use eager (--kd-loss-impl)")
    return implementation


@cache
def choose(implementation: str, device: torch.device, dtype: torch.dtype, needs_float64: bool = False) -> Kernels:
    """The kernels of an implementation, for inputs of a dtype on a device. Raises ValueError as `resolve` does.

    With `needs_float64` (see `KernelContext`) they are the eager ones, whatever the implementation.
    """
    if resolve(implementation, device, dtype) == "triton" and not needs_float64:
        from mkd.losses.kernels import triton_launchers as triton_kernels

        return triton_kernels
    from mkd.losses.kernels import eager

    return eager


def sparse_kernels(base: Kernels) -> SparseKernels:
    """The passes beside a sparse teacher, by the implementation of `base`."""
    from mkd.losses.kernels import eager

    if base is eager:
        return SparseKernels(base)
    from mkd.losses.kernels.triton_sparse import TritonSparseKernels

    return TritonSparseKernels(base)


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason that Triton cannot run; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if dtype == torch.float64:
        return "its kernels have no float64"
    # On CPU the kernels run in Triton's interpreter, if it is enabled before Triton is imported.
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no GPU"
    return None
