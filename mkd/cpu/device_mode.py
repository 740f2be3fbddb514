"""A torch function mode that replaces every "cuda" device by the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_NAMES = {str, torch.device}
_MOVES = {torch.Tensor.cuda, torch.Tensor.pin_memory}
# Functions whose positional arguments may hold a device. An integer there means a CUDA device only in `Tensor.to`.
_TENSOR_TO = torch.Tensor.to


def _to_cpu(device: Any) -> Any:
    """A device argument with CUDA replaced: a name, a `torch.device` or an index; anything else unchanged."""
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


class CudaOnCpu(TorchFunctionMode):
    """Rewrites the device of every torch call made under it."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES:
            return args[0]
        if func is torch.device:
            return _to_cpu(func(*args, **kwargs))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer and clip_grads recognize CUDA tensors by the name of their type.
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is _TENSOR_TO and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        elif not _NAMES.isdisjoint(map(type, args)):  # fast path: this runs for every tensor operation
            args = tuple(_to_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args)
        return func(*args, **kwargs)


def _under_mode(run_backward: Callable) -> Callable:
    """Enter the mode again inside `backward`: a torch function runs without the mode that dispatched it, but the Python
    code of the backward pass needs it.
    """

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with CudaOnCpu():
            return run_backward(*args, **kwargs)

    return run


_mode: CudaOnCpu | None = None


def is_entered() -> bool:
    return _mode is not None


def enter() -> None:
    """Enter the mode for the lifetime of this thread."""
    global _mode
    _mode = CudaOnCpu()
    _mode.__enter__()
    torch.autograd._engine_run_backward = _under_mode(torch.autograd._engine_run_backward)
