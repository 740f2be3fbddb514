"""On GPUs with Transformer Engine in bf16: every layout trains like one GPU.

    pytest -m gpu tests/gpu/test_layouts.py -s

bf16 rounds differently in every layout, so "like" needs a yardstick: how far bf16 on one GPU is from fp32 on one GPU.
The table goes to docs/benchmarks.md; with MKD_BENCH_OUT=DIR it is also written there as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROOT = Path(__file__).parents[2]
STEPS = 20
VOCAB = 32000
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
LAYOUTS = {
    "one GPU": (1, ["--micro-batch-size", "2"]),
    "one GPU, micro-batch 4": (1, ["--micro-batch-size", "4"]),
    "one GPU, teacher offloaded": (1, ["--micro-batch-size", "2", "--kd-teacher-offload"]),
    "one GPU, fp32": (1, ["--micro-batch-size", "2"]),
    "TP2+SP": (2, ["--micro-batch-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "PP2": (2, ["--micro-batch-size", "2", *PIPELINE]),
    "PP2, two virtual stages": (
        2,
        ["--micro-batch-size", "2", *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"],
    ),
    "DP2": (2, ["--micro-batch-size", "2"]),
    "DP2, distributed optimizer, overlap": (2, ["--micro-batch-size", "2", *OVERLAP]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of about 0.9e9 parameters with a peaked distribution, a student of 0.2e9, and text with structure."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    sizes = {
        "teacher": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_key_value_heads=8),
        "student": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_key_value_heads=4),
    }
    for name, size in sizes.items():
        torch.manual_seed(len(name))
        config = LlamaConfig(
            vocab_size=VOCAB,
            num_attention_heads=16,
            max_position_embeddings=4096,
            tie_word_embeddings=name == "student",
            **size,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        if name == "teacher":
            model.lm_head.weight.data.mul_(4.0)
        model.save_pretrained(folder / name)
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    for _ in range(600):
        tokens = np.minimum(rng.zipf(1.3, size=1024), VOCAB - 2)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(str(folder / "text.idx"))
    return folder


def train(models: Path, name: str, ranks: int, flags: list[str]) -> list[dict]:
    """Run pretrain_kd.py; its metrics, a dictionary an iteration."""
    metrics = models / f"{name.replace(' ', '_')}.jsonl"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "pretrain_kd.py"),
        *("--kd-teacher-hf", str(models / "teacher"), "--kd-student-hf", str(models / "student")),
        *("--kd-ratio", "0.5", "--kd-metrics-file", str(metrics), "--data-path", str(models / "text")),
        *("--tokenizer-type", "NullTokenizer", "--split", "90,10,0", "--seq-length", "1024"),
        *("--global-batch-size", "16", "--train-iters", str(STEPS), "--lr", "3e-4", "--lr-warmup-iters", "2"),
        *("--eval-interval", "1000", "--eval-iters", "1", "--seed", "7"),
        *(() if name.endswith("fp32") else ("--bf16",)),
        *flags,
    ]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{name}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def difference(a: list[dict], b: list[dict], key: str) -> float:
    """The largest relative difference over all steps."""
    assert len(a) == len(b) == STEPS
    return max(abs(x[key] - y[key]) / abs(y[key]) for x, y in zip(a, b, strict=True))


def test_every_layout_trains_like_one_gpu(models: Path) -> None:
    runs = {name: train(models, name, ranks, flags) for name, (ranks, flags) in LAYOUTS.items()}
    one = runs["one GPU"]
    keys = ("loss", "ce", "kd", "grad_norm")
    rows = {
        name: {
            **{key: difference(run, one, key) for key in keys},
            "final_loss": run[-1]["loss"],
            "tokens_per_s": float(np.median([line["tokens_per_s"] for line in run[5:]])),
            "peak_memory_gib": run[-1]["peak_memory_gib"],
        }
        for name, run in runs.items()
    }
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, row in rows.items():
        print(f"{name:38s}", *(f"{key} {value:.3g}" for key, value in row.items()), sep=" | ")
    if out := os.environ.get("MKD_BENCH_OUT"):
        Path(out, "layouts.json").write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    noise = rows.pop("one GPU, fp32")
    for name, row in rows.items():
        for key in keys:
            assert row[key] <= noise[key], f"{name}: {key} differs by {row[key]}, bf16 from fp32 by {noise[key]}"
    assert one[-1]["ce"] < one[0]["ce"]
