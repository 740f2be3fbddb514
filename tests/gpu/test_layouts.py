"""On GPUs with Transformer Engine in bf16: every layout trains like one GPU.

    pytest -m gpu tests/gpu/test_layouts.py -s

bf16 rounds differently in every layout, so "like" needs a yardstick: how far bf16 on one GPU is from fp32 on one GPU.
The table goes to docs/benchmarks.md; with MKD_BENCH_OUT=DIR it is also written there as JSON.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.gpu.layout_runs import KEYS, launch, row, write_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS = 20
VOCAB = 32000
MBS2 = ["--micro-batch-size", "2"]
PP2 = [*MBS2, "--pipeline-model-parallel-size", "2"]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
TP2_SP = [*MBS2, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
CP2 = [*MBS2, "--context-parallel-size", "2"]
LAYOUTS = {
    "mbs4": (1, ["--micro-batch-size", "4"]),
    "teacher-offload": (1, [*MBS2, "--kd-teacher-offload"]),
    "tp2-sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "pp2-vp2": (2, [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "dp2": (2, MBS2),
    "dp2-overlap": (2, [*MBS2, *OVERLAP]),
    "cp2": (2, CP2),
    "cp2-all-gather": (2, [*CP2, "--cp-comm-type", "all_gather"]),
    "cp2-a2a": (2, [*CP2, "--cp-comm-type", "a2a"]),
}
TEACHER_TP2, TEACHER_PP2, TEACHER_CP2 = (
    [f"--kd-teacher-{kind}-parallel-size", "2"] for kind in ("tensor-model", "pipeline-model", "context")
)
TEACHER_LAYOUTS = {
    "dp2, teacher tp2": [*MBS2, *OVERLAP, *TEACHER_TP2],
    "dp2, teacher pp2": [*MBS2, *TEACHER_PP2],
    "tp2-sp, teacher cp2": [*TP2_SP, "--kd-teacher-tensor-model-parallel-size", "1", *TEACHER_CP2],
    "pp2, teacher dp2": [*PP2, "--kd-teacher-pipeline-model-parallel-size", "1"],
}
"""The teacher has a layout of its own."""
PACKED = ["--data-path", "{folder}/short", "--kd-packing", "best_fit"]
PACKED_LAYOUTS = {
    "packed, mbs4": (1, ["--micro-batch-size", "4"]),
    "packed, cp2": (2, CP2),
    "packed, cp2-a2a": (2, [*CP2, "--cp-comm-type", "a2a"]),
    "packed, tp2-sp": (2, TP2_SP),
    "packed, pp2": (2, PP2),
    "packed, cp2, teacher tp2": (2, [*CP2, "--kd-teacher-context-parallel-size", "1", *TEACHER_TP2]),
}
"""Documents of very different lengths, several a row; compared with one GPU that has the same rows."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of about 0.9e9 parameters with a peaked distribution, a student of 0.2e9, and text with structure."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("models")
    teacher = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_key_value_heads=8)
    student = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_key_value_heads=4)
    write_models(
        folder,
        teacher,
        {**student, "tie_word_embeddings": True},
        vocab_size=VOCAB,
        num_attention_heads=16,
        max_position_embeddings=4096,
    )
    rng = np.random.default_rng(0)
    short = np.clip(np.random.default_rng(1).lognormal(5.0, 1.0, 3000), 2, 1024).astype(int)
    lengths = {"text": [1024] * 600, "short": short.tolist()}
    for name, of_documents in lengths.items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for length in of_documents:
            tokens = np.minimum(rng.zipf(1.3, size=length), VOCAB - 2)
            builder.add_document(torch.from_numpy(tokens), [length])
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


def train(models: Path, name: str, ranks: int, flags: list[str]) -> list[dict]:
    """Run pretrain_kd.py; its metrics, a dictionary an iteration."""
    return launch(
        name,
        models,
        ranks,
        [
            *("--kd-teacher-hf", str(models / "teacher"), "--kd-student-hf", str(models / "student")),
            *("--kd-ratio", "0.5", "--data-path", str(models / "text"), "--tokenizer-type", "NullTokenizer"),
            *("--split", "90,10,0", "--seq-length", "1024", "--global-batch-size", "16"),
            *("--train-iters", str(STEPS), "--lr", "3e-4", "--lr-warmup-iters", "2"),
            *("--eval-interval", "1000", "--eval-iters", "1", "--seed", "7"),
            *(flag.format(folder=models) for flag in flags),
        ],
    )


@pytest.fixture(scope="module")
def one_gpu(models: Path) -> tuple[list[dict], dict[str, float]]:
    """The run that the others are compared with, and how far fp32 is from it."""
    one = train(models, "one GPU", 1, [*MBS2, "--bf16"])
    assert one[-1]["ce"] < one[0]["ce"]
    row("one GPU", one, one)
    return one, row("one GPU, fp32", train(models, "fp32", 1, MBS2), one)


@pytest.fixture(scope="module")
def packed_on_one_gpu(models: Path) -> list[dict]:
    """The run that packed layouts are compared with."""
    one = train(models, "packed, one GPU", 1, [*MBS2, *PACKED, "--bf16"])
    assert one[-1]["ce"] < one[0]["ce"]
    row("packed, one GPU", one, one)
    return one


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_like_one_gpu(models: Path, one_gpu: tuple[list[dict], dict[str, float]], name: str) -> None:
    one, noise = one_gpu
    ranks, flags = LAYOUTS[name]
    compare(name, train(models, name, ranks, [*flags, "--bf16"]), one, noise)


@pytest.mark.parametrize("name", TEACHER_LAYOUTS)
def test_a_teacher_in_another_layout_teaches_like_on_one_gpu(
    models: Path, one_gpu: tuple[list[dict], dict[str, float]], name: str
) -> None:
    compare(name, train(models, name, 2, [*TEACHER_LAYOUTS[name], "--bf16"]), *one_gpu)


@pytest.mark.parametrize("name", PACKED_LAYOUTS)
def test_packed_layout_trains_like_one_gpu(
    models: Path, packed_on_one_gpu: list[dict], one_gpu: tuple[list[dict], dict[str, float]], name: str
) -> None:
    """Transformer Engine has no fp32 attention over packed rows: the noise is that of whole rows."""
    ranks, flags = PACKED_LAYOUTS[name]
    compare(name, train(models, name, ranks, [*flags, *PACKED, "--bf16"]), packed_on_one_gpu, one_gpu[1])


def compare(name: str, run: list[dict], one: list[dict], noise: dict[str, float]) -> None:
    values = row(name, run, one)
    for key in KEYS:
        assert values[key] <= noise[key], f"{key} differs by {values[key]}, bf16 from fp32 by {noise[key]}"
