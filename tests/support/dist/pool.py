"""Pools of gloo worker processes that last as long as the tests of this folder.

A torchrun a test costs 10 s of imports. Here each worker is a fork of `tests.support.fork_server`; the default group is
made once a pool, and each case is a function sent to all ranks.
"""

import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import torch

from tests.support.fork_server import fork_server

TIMEOUT_S = 120.0
"""Default limit of one case."""
GRACE_S = 1.0
"""After the first failure: how long the other ranks may take to report theirs before they are killed."""


class WorkerError(AssertionError):
    """A case failed in a worker; the message holds the traceback of each rank that reported one."""


def _destroyed_groups() -> list[torch.distributed.ProcessGroup]:
    """Destroy every group but the default one; the objects keep their threads while they are referred to."""
    default = torch.distributed.group.WORLD
    groups = [group for group in torch.distributed.distributed_c10d._world.pg_map if group is not default]
    for group in groups:
        torch.distributed.destroy_process_group(group)
    return groups


def _leave_groups() -> None:
    """Destroy every group but the default one, and release what megatron still holds of them.

    A group that is referred to keeps three threads, one of which wakes a hundred times a second. A layout makes dozens
    of groups: left alive they add up over the cases to thousands of threads, which take half of the machine.
    """
    from tests.support.dist.preload import MEGATRON_CACHES, MoETokenDispatcher

    groups = _destroyed_groups()
    for cache in MEGATRON_CACHES:  # of rotary embeddings, which have a group
        cache.cache_clear()
    # Holds tensors with a graph, which holds hooks of parameters, which hold the model: a cycle that Python cannot see.
    for found in gc.get_objects():
        if issubclass(type(found), MoETokenDispatcher):
            vars(found).clear()
    gc.collect()
    # A group that is freed waits for its thread, up to 10 ms: all of them at once.
    threads = [Thread(target=groups.pop) for _ in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _reply(payload: bytes, rank: int, world_size: int) -> bytes:
    """Run a case: pickled (True, what it returned) or (False, its traceback)."""
    try:
        func, args = pickle.loads(payload)
        return pickle.dumps((True, func(rank, world_size, *args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _worker(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """Join the group, then run what comes down the pipe until it closes."""
    from tests.support.dist import preload  # noqa: F401  (already imported in the fork server)

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    # If a peer dies inside a collective, gloo fails by itself at this limit even when nobody kills this process.
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=10),
    )
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        message = _reply(payload, rank, world_size)
        _leave_groups()
        pipe.send_bytes(message)


class Pool:
    """`world_size` workers in one gloo group. Started at the first case, restarted after a failed one."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: torch.distributed.TCPStore | None = None

    def run(self, func: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S) -> list[Any]:
        """Call `func(rank, world_size, *args)` on every rank.

        Args:
            func: a function at the top level of a module that workers can import.
            args: picklable, the same for all ranks.
            timeout: seconds until the case counts as failed.

        Returns:
            What each rank returned, by rank. Tensors come back as copies.

        Raises:
            WorkerError: a rank raised, died, or did not answer in time. All ranks are killed then, since the others may
                wait in a collective, and the next case starts new ones.
        """
        payload = pickle.dumps((func, args))
        if not self._processes:
            self._start()
        failed = True
        try:
            for pipe in self._pipes:
                pipe.send_bytes(payload)
            results = self._collect(f"{func.__module__}.{func.__qualname__}{args!r}", timeout)
            failed = False
        finally:
            if failed:
                self.stop()
        return results

    def _start(self) -> None:
        context = fork_server()
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(rank, self.world_size, self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, case: str, timeout: float) -> list[Any]:
        """The results by rank, or WorkerError with all failures that were reported."""
        deadline = time.monotonic() + timeout
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        results: list[Any] = [None] * self.world_size
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    succeeded, results[rank] = False, f"the process died (exit code {self._exit_code(rank)})"
                if not succeeded:
                    failures.append(f"rank {rank} of {self.world_size}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise WorkerError(f"{case}\n" + "\n".join(failures))
        if waiting:
            raise WorkerError(f"{case}\nno answer within {timeout:g} s from ranks {sorted(waiting.values())}")
        return results

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(GRACE_S)
        return self._processes[rank].exitcode

    def stop(self) -> None:
        """End the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []
        self._store = None


_POOLS: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The pool of that many ranks."""
    return _POOLS.setdefault(world_size, Pool(world_size))


def stop_all() -> None:
    """End all pools."""
    while _POOLS:
        _POOLS.popitem()[1].stop()
