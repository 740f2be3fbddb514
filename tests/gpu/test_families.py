"""On one GPU with Transformer Engine in bf16: every family trains like on CPU in fp32, as student and as teacher.

    pytest -m gpu tests/gpu/test_families.py -s

The weights are random, with an LM head that makes the logits large: a layer that computes something else changes the
loss and the gradient by far more than bf16 does. The table goes to docs/benchmarks.md.
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.dist.test_hf_families import MODELS, NO_SPECIAL_TOKENS
from tests.support.gpu.layout_runs import KEYS, difference, launch
from tests.support.vision_language import WHOLE, whole_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

VOCAB = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""Widths that the kernels of Transformer Engine take."""
WIDE = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "attention_chunk_size": 256,
    "floor_scale": 257,
    "moe_shared_expert_intermediate_size": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 32,
}
"""The same for keys that only some families have."""
AT_A_TIME = max(1, (os.cpu_count() or 1) // 2)
"""Comparisons at a time."""


@dataclass(frozen=True)
class Case:
    """Models to compare."""

    sizes: dict[str, Any]
    """Keys of config.json."""
    flags: tuple[str, ...] = ()

    @property
    def has_experts(self) -> bool:
        """True for mixtures; a Granite 4 may have none."""
        return "experts" in json.dumps(self.sizes) and self.sizes.get("num_local_experts") != 0

    @property
    def is_tied(self) -> bool:
        """True if the LM head is the embedding."""
        return '"tie_word_embeddings": true' in json.dumps(self.sizes)

    @property
    def tolerances(self) -> tuple[float, float]:
        """Bounds of losses and of the gradient norm. Another expert for a few tokens is bf16 noise."""
        return (0.03, 0.15) if self.has_experts or self.flags else (0.01, 0.05)


ADAPTERS = ("llama, biases", "qwen3", "glm4", "qwen2 moe", "nemotron-h")
"""Models that train adapters, too: these read the output of a norm that Transformer Engine computes inside a linear
layer, and in a Nemotron-H of one that is a module of its own."""
EXPERTS = ("--kd-lora", "8:32", "--lr", "1e-2", "--kd-lora-modules", "all-linear", "experts.down_proj")
GROUPED = "--moe-grouped-gemm"
MIXTURES = {
    "mixtral": ("experts.gate_up_proj", GROUPED),
    "gpt-oss": ("experts.gate_up_proj", GROUPED),
    "deepseek v2": ("experts.gate_up_proj",),
    "nemotron 3 nano": ("experts.up_proj", GROUPED),
}
"""Models whose routed experts have adapters, too, computed together and one after another: their other parameter of
experts, and flags."""
CASES = {
    **{name: Case(sizes) for name, sizes in MODELS.items()},
    **{f"vision-language, {name}": Case(sizes) for name, sizes in WHOLE.items()},
    **{f"{name}, adapters": Case(MODELS[name], ("--kd-lora", "8:32", "--lr", "1e-2")) for name in ADAPTERS},
    **{f"{name}, adapters of experts": Case(MODELS[name], (*EXPERTS, *flags)) for name, flags in MIXTURES.items()},
}


def widened(sizes: dict[str, Any]) -> dict[str, Any]:
    """A tiny model of tests/dist/test_hf_families.py with widths for GPUs."""
    wide = {**SIZES, **sizes} | {key: WIDE[key] for key in WIDE if sizes.get(key)}
    if "attention_chunk_size" in sizes:  # transformers 5.17 does not store None
        wide["attention_chunk_size"] = WIDE["attention_chunk_size"]
    wide |= {key: SIZES[key] for key in ("hidden_size", "intermediate_size") if key in sizes}
    wide["head_dim"] = SIZES["head_dim"]
    if "short_factor" in (rope := sizes.get("rope_parameters", {})):
        factors = {key: [f for f in rope[key] for _ in range(8)] for key in ("short_factor", "long_factor")}
        length = {"original_max_position_embeddings": SIZES["max_position_embeddings"]}  # rows are no longer
        wide |= {"rope_parameters": {**rope, **factors, **length}, "max_position_embeddings": 512, **length}
    if "llama_4_scaling_beta" in rope:  # rows are no longer than the rope's original length
        wide |= {"rope_parameters": {**rope, "original_max_position_embeddings": SIZES["max_position_embeddings"]}}
    if "mrope_section" in rope:  # whose sum is half of the rotated channels of a head
        channels = int(wide["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        scale = channels // 2 // sum(rope["mrope_section"])
        wide |= {"rope_parameters": {**rope, "mrope_section": [scale * part for part in rope["mrope_section"]]}}
    if "kv_lora_rank" in sizes:
        wide |= {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": WIDE["qk_rope_head_dim"]}
    return wide


def build(sizes: dict[str, Any]) -> torch.nn.Module:
    """A random model, with a vision tower if `sizes` has one."""
    if (text := sizes.get("text_config")) is None:
        config = {key: value for key, value in widened(sizes).items() if key != "shard_size"}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**NO_SPECIAL_TOKENS, **config}))
    text = {key: value for key, value in text.items() if key not in SIZES}
    wide = {key: value for key, value in widened(text).items() if key != "tie_word_embeddings"}
    return AutoModelForImageTextToText.from_config(whole_config(sizes, **wide))


def write_pair(folder: Path, sizes: dict[str, Any]) -> None:
    """folder/teacher and folder/student, two random models of one family in fp32."""
    for seed, name in enumerate(("teacher", "student")):
        torch.manual_seed(seed)
        model = build(sizes).cpu()  # flash-linear-attention places its norms on the GPU
        # With larger tied embeddings a model repeats its input, whatever its layers compute.
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        model.get_output_embeddings().weight.data.mul_(2.0 if tied else 16.0)
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.uniform_(-0.1, 0.1)
        for key, value in model.named_parameters():
            if key.endswith("_proj_bias"):  # of experts, which a new model has at 0
                value.data.uniform_(-0.5, 0.5)
        model.save_pretrained(folder / name)


def write_text(prefix: Path) -> None:
    """Random token ids."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(64):
        builder.add_document(torch.from_numpy(rng.integers(0, VOCAB - 1, size=129)), [129])
    builder.finalize(f"{prefix}.idx")


def train(folder: Path, name: str, *flags: str, **variables: str) -> list[dict]:
    """Two steps of pretrain_kd.py; its metrics, one dictionary per iteration."""
    common = [
        *("--kd-teacher-hf", str(folder / "teacher"), "--kd-student-hf", str(folder / "student"), "--kd-ratio", "0.5"),
        *("--data-path", str(folder / "text"), "--tokenizer-type", "NullTokenizer", "--split", "90,10,0"),
        *("--seq-length", "128", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "2"),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--eval-interval", "1000", "--eval-iters", "1"),
    ]
    return launch(name, folder, 1, [*common, *flags], **variables)


def compare(folder: Path, case: Case) -> dict[str, Any]:
    """Relative differences between bf16 on the GPU and fp32 on CPU, and the losses of both."""
    folder.mkdir(parents=True)
    write_text(folder / "text")
    write_pair(folder, case.sizes)
    gpu = train(folder, "gpu", "--bf16", *case.flags)
    cpu = train(folder, "cpu", *case.flags, MKD_DEVICE="cpu")
    losses = {"gpu": [line["loss"] for line in gpu], "cpu": [line["loss"] for line in cpu]}
    shutil.rmtree(folder)
    # A divergence is a difference of cross-entropies, and its rounding relative to them; tied models have a small one.
    nats = max(abs(x["kd"] - y["kd"]) / y["loss"] for x, y in zip(gpu, cpu, strict=True))
    return {key: difference(gpu, cpu, key) for key in KEYS} | {"kd of the loss": nats} | losses


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """name -> its comparison, several at a time; those of the selected tests."""
    root = tmp_path_factory.mktemp("families")
    selected = [item.callspec.params["name"] for item in request.session.items if "runs" in item.fixturenames]
    pool = ThreadPoolExecutor(AT_A_TIME)
    yield {name: pool.submit(compare, root / str(i), CASES[name]) for i, name in enumerate(selected)}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_trains_like_fp32_on_cpu(runs: dict[str, Future], name: str) -> None:
    found = runs[name].result()
    print(f"\n{name:40s}", json.dumps(found), flush=True)
    if out := os.environ.get("MKD_BENCH_OUT"):
        with Path(out, "families.jsonl").open("a") as file:
            file.write(json.dumps({"model": name, **found}) + "\n")
    loss, gradient = CASES[name].tolerances
    divergence = "kd of the loss" if CASES[name].is_tied else "kd"
    assert max(found["loss"], found["ce"], found[divergence]) < loss
    assert found["grad_norm"] < gradient
