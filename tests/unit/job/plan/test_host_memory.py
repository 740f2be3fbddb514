"""Host memory of --kd-rollout-offload: what is free, and the error where it is too little."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mkd.errors import MkdConfigError
from mkd.job.plan import memory_table
from mkd.utils.host_memory import free_host_bytes

MEMINFO = "MemTotal:       16 kB\nMemFree:         2 kB\nMemAvailable:    8 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8192),
        ({"memory.max": "max\n", "memory.stat": "anon 5\n"}, 8192),
        ({"memory.max": "4000\n", "memory.stat": "inactive_anon 9\nanon 1000\nfile 2999\n"}, 3000),
        ({"memory.max": "4000\n", "memory.stat": "anon 5000\n"}, 0),
        ({"memory/memory.limit_in_bytes": "4000\n", "memory/memory.stat": "cache 7\nrss 3000\n"}, 1000),
        ({"memory.max": "\xff", "memory.stat": ""}, 8192),
    ],
)
def test_free_memory_of_machine_and_container(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path / "meminfo", tmp_path) == expected
    assert free_host_bytes(tmp_path / "none", tmp_path / "none") is None
    assert free_host_bytes() > 0


def test_too_little_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimpleNamespace()
    monkeypatch.setattr(memory_table, "workload", lambda job: job)
    monkeypatch.setattr(memory_table, "offloaded_bytes", lambda work: 3e9)
    monkeypatch.setattr(memory_table, "free_host_bytes", lambda: int(7e9))
    memory_table.check_host_memory(job)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    text = (
        "--kd-rollout-offload takes 3.00 GB of host memory on each rank, 9.00 GB on this machine, but 7.00 GB are free"
    )
    with pytest.raises(MkdConfigError, match=text):
        memory_table.check_host_memory(job)
    monkeypatch.setattr(memory_table, "free_host_bytes", lambda: None)
    memory_table.check_host_memory(job)
