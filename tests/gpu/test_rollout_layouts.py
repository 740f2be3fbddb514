"""Tensor parallelism on two GPUs: rollouts write the texts of one GPU.

pytest -m gpu tests/gpu/test_rollout_layouts.py

Their speed: the command in `tests.support.gpu.rollout_ranks`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu.rank_server import ROOT, rank_server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS = ROOT / "tests/support/gpu/rollout_ranks.py"


def rollouts(out: Path, ranks: int, *flags: str) -> dict[str, Any]:
    """The output of `tests.support.gpu.rollout_ranks`; products of fp32 are not rounded to TF32."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": path}
    server = rank_server(frozenset(variables.items()))
    words = [str(RANKS), "--out", str(out), *flags]
    status, output = server.run(words, out.with_suffix(".log"), ranks, timeout=120.0)
    assert status == 0, output[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rollouts(tmp_path_factory.mktemp("one") / "one.json", 1)


@pytest.mark.skipif(
    torch.cuda.device_count() > 1 and not torch.cuda.can_device_access_peer(0, 1), reason="needs GPUs that share memory"
)
@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)], ids=lambda flags: " ".join(flags) or "-")
def test_two_gpus_write_the_texts_of_one(one_gpu: dict[str, Any], tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Outputs of layers are read from each other's memory."""
    found = rollouts(tmp_path / "two.json", 2, *flags)
    assert found["reasons_for_nccl"] == []
    assert found["texts"] == one_gpu["texts"]
    differences = found["differences"]
    assert differences["ranks"] == differences["residual"] == 0.0
    assert differences["norm"] <= 2**-7, "the last bit of bf16"


@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)], ids=lambda flags: " ".join(flags) or "-")
def test_two_gpus_without_shared_memory(one_gpu: dict[str, Any], tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert rollouts(tmp_path / "two.json", 2, "--nccl", *flags)["texts"] == one_gpu["texts"]
