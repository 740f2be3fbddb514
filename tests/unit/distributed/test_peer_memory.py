"""Memory that GPUs share: the reasons against it are the same on all ranks, and found before a rank waits."""

import ctypes
from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from mkd.distributed import peer_memory
from mkd.distributed.peer_memory import NoPeerMemory

GROUP = Namespace(size=lambda: 2, rank=lambda: 0)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one host with access to each other's memory, and a rank whose values are those of both."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(peer_memory, "_device_key", lambda index: index + 10)
    monkeypatch.setattr(peer_memory, "_has_native_atomics", lambda *_: True)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda found, *_, **__: found.copy_(devices((0, 10), (1, 11))))


def devices(*pairs: tuple[int, int]) -> torch.Tensor:
    """(index, key) of the GPU of each rank."""
    return torch.tensor(pairs)


def reason() -> str:
    with pytest.raises(NoPeerMemory) as raised:
        peer_memory.peer_memory(GROUP, 64)
    return str(raised.value)


@pytest.mark.parametrize("pairs", [((0, 10), (0, 10)), ((0, 10), (1, 12)), ((0, 10), (5, 15))])
def test_gpus_that_are_not_peers(monkeypatch: pytest.MonkeyPatch, pairs: Any) -> None:
    """Two ranks on one GPU, a GPU of another host, one that this process does not see."""
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda found, *_, **__: found.copy_(devices(*pairs)))
    assert "different ones of one host" in reason()


def test_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers through PCIe have access without atomic operations."""
    monkeypatch.setattr(peer_memory, "_has_native_atomics", lambda *_: False)
    assert "no atomic operations" in reason()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert "no access" in reason()


@pytest.mark.parametrize(("status", "value", "expected"), [(0, 1, True), (0, 0, False), (101, 1, False)])
def test_atomics(monkeypatch: pytest.MonkeyPatch, status: int, value: int, expected: bool) -> None:
    monkeypatch.undo()
    asked = []

    def attribute(found: Any, number: int, device: int, peer: int) -> int:
        asked.append((number, device, peer))
        found._obj.value = value
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Namespace(cuDeviceGetP2PAttribute=attribute))
    assert peer_memory._has_native_atomics(0, 1) is expected and asked == [(3, 0, 1)]


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not peer_memory._has_native_atomics(0, 1)


@pytest.mark.parametrize("own", [True, False])
def test_a_rank_without_memory(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """No rank enters the rendezvous, in which it would wait for the one that has none."""
    reductions = []

    def reduced(found: torch.Tensor, **unused: Any) -> None:
        reductions.append(found.item())
        if len(reductions) == 2:  # of the allocation
            found.fill_(1)

    def empty(*sizes: int, **unused: Any) -> torch.Tensor:
        if own:
            raise RuntimeError("out of memory\nand details")
        return torch.ones(*sizes, dtype=torch.uint8)

    monkeypatch.setattr(dist, "all_reduce", reduced)
    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *_: pytest.fail("a rank has no memory"))
    assert reason() == ("out of memory" if own else "another rank has a reason against it")
    assert reductions == [0, int(own)]
