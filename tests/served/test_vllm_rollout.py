"""A real vLLM on CPU writes the student's texts, with the weights of each step: the training is that of own texts.

    bash tests/served/setup_vllm.sh
    pytest -m served tests/served/test_vllm_rollout.py -s

The student has half of the layers of SmolLM2-135M-Instruct, and an LM head of its own: vLLM 0.32 on a CPU does not load
that of a model which ties it to the embedding. About two minutes on two cores.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.served.test_vllm import folder, pytestmark, serving, train  # noqa: F401

LENGTH, STEPS = 48, 3
PROMPTS = ("The import statement", "A class is", "What is a list?", "Python", "The", "In this section", "x =", "def")


def untied(source: Path, out: Path) -> Path:
    """A copy of a model with tied embeddings whose LM head is a tensor of its own."""
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return out


def test_vllm_writes_with_the_weights_of_each_step(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    student = untied(folder / "student", tmp_path / "student")
    flags = {
        "--kd-student-hf": student,
        "--kd-on-policy": 1,
        "--kd-prompts": prompts,
        "--kd-rollout-tokens": 12,
        "--kd-rollout-temperature": 0,
        "--kd-loss": "reverse_kl",
        "--kd-top-k": None,
        "--kd-packing": None,
        "--kd-ratio": 1,
        "--seq-length": LENGTH,
        "--train-iters": STEPS,
        "--lr": 1e-3,
    }
    own = train(folder, tmp_path / "own", flags)
    options = ["--max-model-len", LENGTH + 1, "--dtype", "float32"]
    with serving(student, tmp_path / "vllm.log", options, VLLM_SERVER_DEV_MODE="1") as url:
        served = train(folder, tmp_path / "served", flags | {"--kd-rollout-url": url})
    log = (tmp_path / "vllm.log").read_text()
    assert log.count('POST /collective_rpc HTTP/1.1" 200') == STEPS
    print([(line["kd"], line["written_tokens"]) for line in served.metrics if "grad_norm" in line])
    for line, truth in zip(served.metrics, own.metrics, strict=True):
        for name in ("kd", "written_tokens", "grad_norm"):
            if name in truth:
                assert line[name] == pytest.approx(truth[name], rel=1e-4), name
    left = sorted(path.name for path in (tmp_path / "served/rollout").iterdir())
    assert left == ["hf_assets", "step_0000002", *(f"texts_000000{step}.json" for step in range(STEPS))]
