"""Hidden states that wait in host memory, on a GPU: the same metrics to the last bit, and less memory on the device.

Transformer Engine has to take a deterministic attention: in long rows its fastest backward pass adds up gradients in
the order in which they arrive, so that two equal runs differ from the second step on.

pytest -m gpu tests/gpu/test_teacher_signals.py -s
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.gpu.layout_runs import KEYS, launch, write_models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB, LENGTH, MICROBATCHES, WIDTH = 4096, 4096, 64, 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("models")
    teacher = dict(hidden_size=WIDTH, intermediate_size=5632, num_hidden_layers=8, num_key_value_heads=8)
    student = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_key_value_heads=4)
    write_models(folder, teacher, student, vocab_size=VOCAB, num_attention_heads=16, max_position_embeddings=LENGTH)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    rng = np.random.default_rng(0)
    for _ in range(100):
        builder.add_document(torch.from_numpy(np.minimum(rng.zipf(1.3, size=LENGTH), VOCAB - 2)), [LENGTH])
    builder.finalize(str(folder / "text.idx"))
    return folder


def train(models: Path, memory: str, microbatches: int) -> list[dict]:
    words = ["--kd-teacher-hf", str(models / "teacher"), "--kd-student-hf", str(models / "student")]
    words += ["--kd-ratio", "0.5", "--data-path", str(models / "text"), "--bf16", "--tokenizer-type", "NullTokenizer"]
    words += ["--split", "90,10,0", "--seq-length", str(LENGTH), "--micro-batch-size", "1", "--kd-teacher-offload"]
    words += ["--global-batch-size", str(microbatches), "--train-iters", "4", "--lr", "1e-3", "--eval-interval", "1000"]
    words += ["--eval-iters", "1", "--seed", "7", "--kd-teacher-signals", memory]
    run = launch(f"{memory} {microbatches}", models, 1, words, NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
    print(memory, microbatches, [(line["peak_memory_gib"], line["step_s"]) for line in run[1:]], flush=True)
    return run


def test_host_and_device(models: Path) -> None:
    jobs = [("device", MICROBATCHES), ("host", MICROBATCHES), ("host", 8)]
    with ThreadPoolExecutor() as pool:
        device, host, few = pool.map(lambda job: train(models, *job), jobs)
    assert [[line[key] for key in KEYS] for line in host] == [[line[key] for key in KEYS] for line in device]
    states = MICROBATCHES * 2 * LENGTH * WIDTH / 2**30
    saved = device[-1]["peak_memory_gib"] - host[-1]["peak_memory_gib"]
    assert saved > 0.8 * states
    assert few[-1]["peak_memory_gib"] == pytest.approx(host[-1]["peak_memory_gib"], abs=0.02)
