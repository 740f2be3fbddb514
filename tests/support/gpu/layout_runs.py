"""Trainings on GPUs that are compared with each other, and a table of how far apart they are."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support.gpu.rank_server import ROOT, rank_server

KEYS = ("loss", "ce", "kd", "grad_norm")


def write_models(folder: Path, teacher: dict[str, Any], student: dict[str, Any], **common: Any) -> None:
    """folder/teacher, random and made sure of itself, and folder/student, in bf16; sizes are those of LlamaConfig."""
    sizes = {"teacher": teacher, "student": student}
    save_models(folder, LlamaForCausalLM, {name: LlamaConfig(**common, **own) for name, own in sizes.items()})


def save_models(folder: Path, model_class: type[PreTrainedModel], configs: Mapping[str, PretrainedConfig]) -> None:
    """The same for models of any class; `configs` are those of teacher and student."""
    for name, config in configs.items():
        torch.manual_seed(len(name))
        model = model_class(config).to(torch.bfloat16)
        if name == "teacher":
            model.lm_head.weight.data.mul_(4.0)
        model.save_pretrained(folder / name)


def launch(name: str, folder: Path, ranks: int, flags: list[str], **variables: str) -> list[dict]:
    """Run pretrain_kd.py; its metrics, one dictionary per iteration.

    Args:
        name: of the run; its metrics file in `folder` is called after it.
        folder: see `name`.
        ranks, flags: of the run.
        variables: environment variables beside those of this process.
    """
    label = name.replace(" ", "_").replace(",", "")
    metrics = folder / f"{label}.jsonl"
    # The teachers are sure of random things.
    words = ["pretrain_kd.py", "--kd-allow-bad-teacher", "--kd-metrics-file", str(metrics), *flags]
    gpus = {key: variables.pop(key) for key in ("CUDA_VISIBLE_DEVICES",) if key in variables}
    common = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4", **variables}
    common.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank starts a pool of 32 processes
    server = rank_server(frozenset(common.items()))
    status, output = server.run([str(ROOT / words[0]), *words[1:]], folder / f"{label}.log", ranks, **gpus)
    assert status == 0, f"{name}: status {status}\n{output[-9000:]}"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def difference(a: list[dict], b: list[dict], key: str) -> float:
    """The largest relative difference over all steps."""
    return max(abs(x[key] - y[key]) / abs(y[key]) for x, y in zip(a, b, strict=True))


def row(name: str, run: list[dict], one: list[dict], **facts: Any) -> dict[str, float]:
    """A line of the table: printed, and with MKD_BENCH_OUT=DIR written there, with `facts` in addition."""
    values = {
        **{key: difference(run, one, key) for key in KEYS},
        "final_loss": run[-1]["loss"],
        "tokens_per_s": float(np.median([line["tokens_per_s"] for line in run[5:]])),
        "peak_memory_gib": run[-1]["peak_memory_gib"],
    }
    print(f"\n{name:16s}", *(f"{key} {value:.3g}" for key, value in values.items()), sep=" | ", flush=True)
    if out := os.environ.get("MKD_BENCH_OUT"):
        with Path(out, "layouts.jsonl").open("a") as file:
            file.write(json.dumps({"card": torch.cuda.get_device_name(), "layout": name, **values, **facts}) + "\n")
    return values
