"""On one GPU with Transformer Engine: logits and the gradient of every parameter of every family are transformers'.

    pytest -m gpu tests/gpu/test_family_gradients.py -s

The weights are random, all of them, and rounded to bf16; transformers computes the reference on CPU in fp32, and the
yardstick is the error of Megatron's local layers on CPU in bf16. With MKD_BENCH_OUT, DIR/family_gradients.jsonl has one
line per model. `pytest -m slow` compares on CPU what needs no GPU, and that planted faults exceed the bounds.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mkd.cpu import is_active
from tests.support.dist.gpt_models import layout
from tests.support.dist.pool import pool, stop_all
from tests.support.gpu.family_gradients import (
    CPU,
    NAMES,
    Errors,
    errors_in,
    kind_of,
    measure,
    start,
    variants,
    write_reference,
)
from tests.support.hf_models import HYBRID_MODELS
from tests.support.tolerance import LOGITS

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(is_active(), reason="needs a GPU"),
]
PER_GPU = 4
"""Processes per GPU; most of their time is that of the host."""
FP32_ON_GPU = 2e-4
"""Transformer Engine in fp32, with TF32 turned off."""
TRITON = 2e-2
"""The same where Triton kernels may compute delta nets, with products in TF32."""
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}


def fp32_bound(name: str) -> float:
    """Bound of every error in fp32 on a GPU."""
    kernels = (*HYBRID_MODELS, "vision-language, qwen3_5", "vision-language, qwen3_5_moe")
    return TRITON if name in kernels else FP32_ON_GPU


def parts(names: list[str], count: int) -> list[list[str]]:
    """At most `count` parts of `names`, each in their order."""
    return [names[i::count] for i in range(min(count, len(names)))]


class Processes:
    """Results of the processes that compare `names`, as they are written."""

    def __init__(self, folder: Path, names: list[str], *, gpu: bool) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}
        gpus = torch.cuda.device_count() if gpu else 0
        cores = max(1, (os.cpu_count() or 1) - PER_GPU * gpus) if gpu else 2
        for i, part in enumerate(parts(names, cores)):
            self.processes[f"cpu{i}"] = start("references", folder, part, f"cpu{i}", **CPU)
        for i, part in enumerate(parts(names, PER_GPU * gpus)):
            device = {"LOCAL_RANK": str(i % gpus)}
            self.processes[f"gpu{i}"] = start("measurements", folder, part, f"gpu{i}", **NO_TF32, **device)

    def result(self, name: str, role: str) -> dict[str, Any]:
        """Computations of one model: label -> errors or failure.

        Raises:
            AssertionError: there is no reference, or all processes have ended without a result.
        """
        file = self.folder / str(NAMES.index(name)) / f"{role}.json"
        kind = "gpu" if role == "measurements" else "cpu"
        while not file.exists():
            working = [key for key, process in self.processes.items() if key[:3] == kind and process.poll() is None]
            if not working and not file.exists():
                ends = [(self.folder / key).read_text()[-2000:] for key in self.processes if key[:3] == kind]
                raise AssertionError("no result; the last output: " + "\n".join(ends))
            time.sleep(0.1)
        found = json.loads(file.read_text())
        reference = found.pop("reference")
        assert "failure" not in reference, reference["failure"]
        return found

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Comparisons of the models of the selected tests."""
    items = [item for item in request.session.items if "runs" in item.fixturenames]
    gpu = any(item.get_closest_marker("gpu") for item in items) and not is_active()
    names = list(dict.fromkeys(item.callspec.params["name"] for item in items))
    found = Processes(tmp_path_factory.mktemp("gradients"), names, gpu=gpu)
    yield found
    found.end()


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in NAMES])
def test_gradients_on_a_gpu(runs: Processes, name: str) -> None:
    yardstick = errors_in(runs.result(name, "references")["bf16"])
    found = runs.result(name, "measurements")
    report(name, yardstick, found)
    wrong = {label: beyond(name, label, content, yardstick) for label, content in found.items()}
    assert {label: errors for label, errors in wrong.items() if errors} == {}
    assert found.keys() == variants(name).keys()


def beyond(name: str, label: str, content: dict[str, Any], yardstick: Errors) -> dict[str, float | str]:
    """Errors of one computation that are above their bounds, or its failure."""
    if "failure" in content:
        return {"failure": content["failure"]}
    errors = errors_in(content)
    if label.startswith("bf16"):
        return errors.beyond(yardstick)
    every = {"logits": errors.logits, "total": errors.total, **errors.parameters}
    return {key: error for key, error in every.items() if not error <= fp32_bound(name)}


def report(name: str, yardstick: Errors, found: Mapping[str, Any]) -> None:
    """Print a table row per computation, and with MKD_BENCH_OUT=DIR write a line of DIR/family_gradients.jsonl."""
    rows = {"bf16, CPU": yardstick}
    rows |= {label: errors_in(content) for label, content in found.items() if "failure" not in content}
    for label, errors in rows.items():
        worst, error = errors.worst
        print(
            f"\n{name:50s} | {label:14s} | {errors.logits:.1e} | {errors.total:.1e} | {error:.1e} {worst}", flush=True
        )
    for label in found.keys() - rows.keys():
        print(f"\n{name:50s} | {label:14s} | failed: {found[label]['failure'].splitlines()[-1]}", flush=True)
    if out := os.environ.get("MKD_BENCH_OUT"):
        line = {label: {"logits": e.logits, "total": e.total, "worst": e.worst} for label, e in rows.items()}
        line |= {label: {"failure": found[label]["failure"]} for label in found.keys() - rows.keys()}
        with Path(out, "family_gradients.jsonl").open("a") as file:
            file.write(json.dumps({"model": name, **line}) + "\n")


def test_kinds_of_parameters() -> None:
    """Parameters of Transformer Engine are compared with those of local layers."""
    layer, attention = "decoder.layers.1", "decoder.layers.1.self_attention"
    alike = {
        f"{attention}.linear_qkv.layer_norm_weight": f"{layer}.input_layernorm.weight",
        f"{attention}.in_proj.layer_norm_weight": f"{layer}.input_layernorm.weight",
        f"{attention}.linear_kv_up_proj.layer_norm_weight": f"{attention}.kv_layernorm.weight",
        f"{layer}.mlp.linear_fc1.layer_norm_bias": f"{layer}.pre_mlp_layernorm.bias",
        f"{layer}.mlp.experts.linear_fc1.weight3": f"{layer}.mlp.experts.local_experts.0.linear_fc1.weight",
        f"{layer}.mlp.experts.linear_fc2.bias12": f"{layer}.mlp.experts.local_experts.2.linear_fc2.bias",
    }
    for fused, local in alike.items():
        assert kind_of(fused) == kind_of(local)
    assert kind_of(f"{layer}.mlp.linear_fc1.weight") != kind_of(f"{layer}.mlp.linear_fc2.weight")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_cpu(runs: Processes, name: str) -> None:
    found = runs.result(name, "references")
    exact, rounded = errors_in(found["fp32"]), errors_in(found["bf16"])
    assert max(exact.logits, exact.total, *exact.parameters.values()) <= LOGITS
    assert len(exact.parameters) > 5
    assert rounded.beyond(rounded) == {}
    assert rounded.total < 0.05  # larger: rounding sends tokens to other experts, and a fault may be hidden


def fill(name: str, value: float) -> Callable[[nn.Module], None]:
    """A change of a model: every element of a parameter of the first layer."""

    @torch.no_grad()
    def change(model: nn.Module) -> None:
        dict(model.named_parameters())[f"decoder.layers.0.{name}"].fill_(value)

    return change


def widen_window(config: Any) -> None:
    before, after = config.transformer.window_size
    config.transformer.window_size = (before + 1, after)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "router bias": ("gpt-oss", {"edit_model": fill("mlp.router.bias", 0.0)}),
    "sinks": ("gpt-oss", {"edit_model": fill("self_attention.core_attention.softmax_offset", -1e4)}),
    "window": ("gpt-oss", {"edit_config": widen_window}),
    "window of mistral": ("mistral, window", {"edit_config": widen_window}),
    "norm": ("qwen3", {"edit_model": fill("pre_mlp_layernorm.weight", 1.0)}),
    "norm of keys": ("qwen3", {"edit_model": fill("self_attention.k_layernorm.weight", 1.0)}),
    "bias": ("llama, biases", {"edit_model": fill("mlp.linear_fc2.bias", 0.0)}),
}
"""Name -> (model, arguments of `measure`)."""


def planted(rank: int, world_size: int, root: Path) -> dict[str, dict[str, float]]:
    """fault -> errors beyond the bounds."""
    found, yardsticks = {}, {}
    with layout(1, 1):
        for fault, (name, edits) in FAULTS.items():
            folder = root / name
            if name not in yardsticks:
                folder.mkdir()
                write_reference(folder, name)
                yardsticks[name] = measure(folder, torch.bfloat16)
            found[fault] = measure(folder, torch.bfloat16, **edits).beyond(yardsticks[name])
    return found


@pytest.mark.slow
def test_planted_faults_exceed_the_bounds(tmp_path: Path) -> None:
    try:
        (found,) = pool(1).run(planted, tmp_path)
    finally:
        stop_all()
    print({fault: max(errors.items(), key=lambda item: item[1]) if errors else None for fault, errors in found.items()})
    assert {fault for fault, errors in found.items() if not ({"logits", "total"} <= errors.keys())} == set()
