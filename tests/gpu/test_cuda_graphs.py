"""A teacher whose forward passes are CUDA graphs, and a student whose layers are: the metrics of a training equal those
without, to the last bit.

pytest -m gpu tests/gpu/test_cuda_graphs.py -s
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.gpu.layout_runs import KEYS, launch, write_models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB, LENGTH = 4096, 256


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("models")
    teacher = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_key_value_heads=8)
    student = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_key_value_heads=4)
    write_models(folder, teacher, student, vocab_size=VOCAB, num_attention_heads=16, max_position_embeddings=LENGTH)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    rng = np.random.default_rng(0)
    for _ in range(200):
        builder.add_document(torch.from_numpy(np.minimum(rng.zipf(1.3, size=LENGTH), VOCAB - 2)), [LENGTH])
    builder.finalize(str(folder / "text.idx"))
    return folder


def train(models: Path, name: str, *flags: str) -> list[dict]:
    words = ["--kd-teacher-hf", str(models / "teacher"), "--kd-student-hf", str(models / "student")]
    words += ["--kd-ratio", "0.5", "--data-path", str(models / "text"), "--bf16", "--tokenizer-type", "NullTokenizer"]
    words += ["--split", "90,10,0", "--seq-length", str(LENGTH), "--micro-batch-size", "2"]
    words += ["--global-batch-size", "12", "--train-iters", "6", "--lr", "1e-3", "--eval-interval", "3"]
    return launch(name, models, 1, [*words, "--eval-iters", "1", "--seed", "7", *flags])


LARGE_PASSES = ("--kd-teacher-micro-batch-size", "8")
OF_STUDENT = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "2")


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        (LARGE_PASSES, ["--kd-teacher-cuda-graph"]),
        ((*LARGE_PASSES, "--kd-teacher-dtype", "fp8"), ["--kd-teacher-cuda-graph"]),
        # The same generator of random numbers in both.
        (("--te-rng-tracker",), OF_STUDENT),
        (("--te-rng-tracker", *LARGE_PASSES), [*OF_STUDENT, "--kd-teacher-cuda-graph"]),
        (("--te-rng-tracker", "--fp8-format", "hybrid"), OF_STUDENT),
    ],
    ids=["teacher", "FP8 teacher", "student", "both", "FP8 student"],
)
def test_metrics_are_equal(models: Path, request: pytest.FixtureRequest, flags: tuple, graphs: list[str]) -> None:
    if "fp8" in " ".join(flags) and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8")
    name = request.node.callspec.id
    jobs = {f"plain {name}": flags, f"graph {name}": [*flags, *graphs]}
    with ThreadPoolExecutor() as pool:
        plain, graph = pool.map(lambda job: train(models, job[0], *job[1]), jobs.items())
    assert [[line[key] for key in KEYS] for line in graph] == [[line[key] for key in KEYS] for line in plain]
    # What graphs hold counts as used.
    assert graph[-1]["peak_memory_gib"] >= plain[-1]["peak_memory_gib"]
