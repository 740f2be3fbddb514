"""Worker function about hidden states that wait for the student: how many are on the device at a time."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mkd.teacher.online import OnlineTeacher
from mkd.teacher.resharded.exchange import StepExchange
from mkd.teacher.waiting_states import HostStates
from mkd.train.objective import SameTokenizerObjective
from tests.support.dist import kd_step as module
from tests.support.dist.kd_step import Layout, Models, kd_step


class LiveStates:
    """Storages of hidden states on the device, and the largest number of them that existed at one time."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self.most = 0

    def add(self, *states: Tensor) -> None:
        for one in states:
            if one.numel():
                storage = one.untyped_storage()
                self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        self.count()

    def count(self) -> None:
        self._storages = {key: one for key, one in self._storages.items() if not one.expired()}
        self.most = max(self.most, len(self._storages))

    def watch(self) -> ExitStack:
        """Watch hidden states that a teacher computes, sends, or copies to the device, and each use of a signal."""

        def of(owner: Any, name: str, found: Callable[[Any], Any]) -> Any:
            original = getattr(owner, name)

            def watched(*args: Any, **options: Any) -> Any:
                result = original(*args, **options)
                self.add(*found(result))
                return result

            return patch.object(owner, name, watched)

        stack = ExitStack()
        stack.enter_context(of(OnlineTeacher, "_outputs", lambda states: states))
        stack.enter_context(of(StepExchange, "_exchange_pass", lambda found: found.values()))
        stack.enter_context(of(HostStates, "_fetch", lambda copy: [copy.hidden]))
        stack.enter_context(of(SameTokenizerObjective, "teacher", lambda logits: []))
        return stack


def steps_in_both_memories(rank: int, world_size: int, layout: Layout, models: Models, repeats: int) -> dict[str, int]:
    """Assert that a step with the samples `repeats` times has the same losses and gradients in both memories.

    Returns:
        Memory -> largest number of hidden states on the device.
    """
    samples, most, results = module.microbatches, {}, []
    for memory in ("device", "host"):
        live = LiveStates()
        repeated = patch.object(module, "microbatches", lambda *args: samples(*args) * repeats)
        with live.watch(), repeated:
            results.append(kd_step(rank, world_size, layout, replace(models, signals=memory)))
        most[memory] = live.most
    device, host = results
    for name, value in device["reports"].items():
        assert torch.equal(host["reports"][name], value), name
    for (key, *_, seen), (_, *_, expected) in zip(host["gradients"], device["gradients"], strict=True):
        assert torch.equal(seen, expected), key
    return most
