"""Loss options: flags that cannot be honored, and loss chunks."""

from types import SimpleNamespace

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError
from mkd.losses import LossOptions
from mkd.losses.inputs import CHUNK_BYTES, MIN_CHUNK_TOKENS, interleave, loss_chunks

CPU = torch.device("cpu")
GPU = SimpleNamespace(type="cuda")
"""A stand-in: in tests without a GPU torch.device("cuda") is the CPU."""


def options(device: torch.device, dtype: torch.dtype, tp_size: int = 1, **flags: object) -> LossOptions:
    return LossOptions.of(KDConfig(teacher_hf=["t"], ratio=0.5, **flags), device, dtype, tp_size)


def test_auto_resolves() -> None:
    assert options(CPU, torch.bfloat16).impl == "eager"
    assert options(GPU, torch.bfloat16, loss_chunk_rows=7) == LossOptions(7, None, "triton")
    assert options(GPU, torch.float16, logits_dtype="fp32").logits_dtype == torch.float32


@pytest.mark.parametrize(
    "device, dtype, tp_size, flags, words",
    [
        (GPU, torch.bfloat16, 2, {"loss_impl": "reference"}, ["--kd-loss-impl reference", "size is 2"]),
        (CPU, torch.float32, 1, {"loss_impl": "triton"}, ["--kd-loss-impl triton", "no GPU"]),
        (GPU, torch.float16, 1, {"logits_dtype": "bf16"}, ["--kd-logits-dtype bf16", "float16"]),
        (CPU, torch.float32, 1, {"logits_dtype": "bf16"}, ["--kd-logits-dtype bf16", "float32"]),
        (
            GPU,
            torch.bfloat16,
            1,
            {"logits_dtype": "bf16", "loss_impl": "reference"},
            ["--kd-logits-dtype", "reference"],
        ),
    ],
)
def test_unavailable_options_are_errors(
    device: torch.device, dtype: torch.dtype, tp_size: int, flags: dict, words: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(MkdConfigError) as error:
        options(device, dtype, tp_size, **flags)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("rows", [0, 1, 500, 768, 1000, 8192])
@pytest.mark.parametrize("columns", [0, 1000, 128256, 262144])
def test_chunks_cover_all_tokens_once_within_the_default_size(rows: int, columns: int) -> None:
    chunks = loss_chunks(rows, columns, torch.bfloat16, None, MIN_CHUNK_TOKENS)
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    most = max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (2 * max(columns, 1)))
    assert max(chunk.stop - chunk.start for chunk in chunks) <= most


@pytest.mark.parametrize("at_a_time, order", [(1, "aAbBcC"), (2, "abABcC")])
def test_interleaved_tasks_alternate(at_a_time: int, order: str) -> None:
    done: list[str] = []

    def task(name: str):
        done.append(name)
        yield
        done.append(name.upper())

    interleave((task(name) for name in "abc"), at_a_time)
    assert "".join(done) == order
