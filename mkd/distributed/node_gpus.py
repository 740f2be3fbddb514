"""GPUs of a node, counted without PyTorch, whose import takes seconds."""

import ctypes
import os

_NVML = "libnvidia-ml.so.1"
"""The driver's library, with which PyTorch counts GPUs too."""


def numbered_gpus() -> list[str] | None:
    """The numbers of the GPUs of this node that CUDA_VISIBLE_DEVICES lists, or of all; None if the driver does not
    count them, and if the variable lists anything but numbers of existing ones."""
    existing = [str(number) for number in range(_count())]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = existing if listed is None else listed.split(",")
    return names if existing and set(names) <= set(existing) else None


def _count() -> int:
    """GPUs of this machine; 0 if the driver is missing or fails."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value
