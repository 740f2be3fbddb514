"""The GPUs that `mkd launch` divides among its jobs: mkd/cli/launch.py and mkd/distributed/node_gpus.py."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkd import cpu
from mkd.cli.launch import visible_devices
from tests.support.e2e.small_job import ROOT, environment


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a driver that finds some GPUs and returns statuses, where PyTorch finds five."""
    monkeypatch.delenv("MKD_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cpu, "wanted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)

    def install(gpus: int, started: int = 0, counted: int = 0) -> None:
        def count(pointer: Any) -> int:
            pointer._obj.value = gpus
            return counted

        library = SimpleNamespace(nvmlInit_v2=lambda: started, nvmlDeviceGetCount_v2=count)
        monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)

    return install


@pytest.mark.parametrize(
    ("listed", "expected"),
    [(None, ["0", "1", "2"]), ("2,0", ["2", "0"]), ("2", ["2"]), ("GPU-6f,GPU-a1", ["GPU-6f", "GPU-a1"]), ("", [])],
)
def test_gpus_that_are_visible(
    driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch, listed: str | None, expected: list[str]
) -> None:
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    driver(gpus=3)
    assert visible_devices() == expected


@pytest.mark.parametrize("statuses", [{"started": 9}, {"counted": 3}])
def test_without_an_answer_of_the_driver_torch_counts(driver: Callable[..., None], statuses: dict[str, int]) -> None:
    driver(gpus=3, **statuses)
    assert visible_devices() == ["0", "1", "2", "3", "4"]


def test_no_gpu_is_visible_where_jobs_run_on_cpu(driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    driver(gpus=0)
    monkeypatch.setattr(cpu, "wanted", lambda: True)
    assert visible_devices() is None
    driver(gpus=3)
    assert visible_devices() == ["0", "1", "2"]
    monkeypatch.setenv("MKD_DEVICE", "cpu")
    assert visible_devices() is None


def test_jobs_on_cpu_are_launched_without_importing_torch() -> None:
    """`--print` does all but starting them."""
    code = "import sys; from mkd.cli.launch import main; print(main(), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "--print", "--student-gpus", "1", "--", "--lr", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
