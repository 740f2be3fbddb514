"""`torch.cuda` on a machine without CUDA: one device, whose streams and events complete at once."""

import collections
import contextlib
import resource
import time
import types
from typing import Any

import torch

CAPABILITY = 8, 0
"""Reported where none is known. It is not a fact about a card: mkd itself reads `mkd.cpu.compute_capability`."""


class _Stream:
    """A stream on which all work has completed."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    """An event that completes when it is recorded."""

    _time = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 1000.0 * (end._time - self._time)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_properties(capability: tuple[int, int]) -> types.SimpleNamespace:
    major, minor = capability
    return types.SimpleNamespace(
        name="cpu", major=major, minor=minor, multi_processor_count=1, total_memory=0, warp_size=32, gcnArchName=""
    )


def _memory_figures() -> dict[str, Any]:
    """Memory statistics. The CPU allocator has none: the peak is that of the process, the others are 0."""
    names = ["memory_allocated", "memory_reserved", "max_memory_reserved"]
    return {name: lambda *args, **kwargs: 0 for name in names} | {
        "max_memory_allocated": lambda *args, **kwargs: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "memory_stats": lambda *args, **kwargs: collections.defaultdict(int),
        "mem_get_info": lambda *args, **kwargs: (0, 0),
    }


def _random_state() -> dict[str, Any]:
    """The CUDA generator is torch's CPU generator."""
    return {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        # Not torch.manual_seed, which calls these.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "default_generators": (torch.default_generator,),
        "_lazy_call": lambda call: call(),
    }


def install(capability: tuple[int, int] = CAPABILITY) -> None:
    """Replace `torch.cuda`'s functions by the stubs; the device has this compute capability."""
    one_stream, properties = _Stream(), _device_properties(capability)
    stubs = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "device": lambda device=None: contextlib.nullcontext(),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "cpu",
        "get_device_capability": lambda device=None: capability,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "current_stream": lambda device=None: one_stream,
        "default_stream": lambda device=None: one_stream,
        "set_stream": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "ipc_collect": _nothing,
        "is_current_stream_capturing": lambda: False,
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=contextlib.nullcontext),
    }
    for name, stub in (stubs | _memory_figures() | _random_state()).items():
        setattr(torch.cuda, name, stub)
    for name, stub in _random_state().items():
        setattr(torch.cuda.random, name, stub)
    # Read by DataLoader and FSDP to pin memory and to find the current device.
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_device_index = lambda: 0
