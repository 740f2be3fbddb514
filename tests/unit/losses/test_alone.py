"""mkd.losses without Megatron: what the import loads and changes, and the examples of examples/losses.

One process, in which an import of megatron fails, does everything.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, logging, os, signal, sys, warnings
import torch

class NoMegatron:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, NoMegatron())
sys.modules["transformer_engine"] = None  # an import fails; peft, which transformers imports, only looks for it

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if module is not None else ():
            if not key.startswith("__") and key != "_":
                found[name, key] = value
            if isinstance(value, type):
                found |= {(name, key, inner): of for inner, of in vars(value).items() if callable(of)}
    return found

def state():
    return [
        dict(os.environ), list(sys.path), [str(f) for f in warnings.filters], logging.root.handlers[:],
        [signal.getsignal(s) for s in signal.valid_signals()], torch.get_default_dtype(), torch.get_num_threads(),
        torch.random.initial_seed(), torch.is_grad_enabled(), sys.excepthook is sys.__excepthook__,
    ]

before, state_before, loaded = attributes(), state(), set(sys.modules)
import mkd
import mkd.losses
result = {"loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded})}
after = attributes()
result["changed"] = sorted(".".join(key) for key, value in before.items() if after.get(key) is not value)
result["kernels"] = "mkd.losses.kernels.triton_launchers" in sys.modules
result["state"] = [i for i, (old, new) in enumerate(zip(state_before, state())) if old != new]

logits = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
teacher = torch.zeros(3, 5, dtype=torch.float64)
ones, labels = torch.ones(3), torch.tensor([0, 1, 2])
out = mkd.losses.vocab_parallel_loss(
    logits, teacher, labels, ones, ones, spec=mkd.losses.LossSpec(divergence="jsd"), true_vocab=4
)
out.loss.backward()
result["loss"] = [out.loss.item(), logits.grad.abs().sum(dim=0).tolist()]

sys.path.insert(0, sys.argv[1])
import plain_pytorch
result["plain"] = plain_pytorch.main(["--steps", "20", "--out", sys.argv[2] + "/plain"])
import hf_trainer
from transformers import AutoModelForCausalLM
result["trainer"] = hf_trainer.main(["--steps", "6", "--out", sys.argv[2] + "/trainer"])
read = [AutoModelForCausalLM.from_pretrained(f"{sys.argv[2]}/{name}") for name in ("plain", "trainer")]
result["read"] = [model.config.hidden_size for model in read]
result["megatron"] = sorted(name for name in sys.modules if name.startswith("megatron"))

parts = hf_trainer.setup(type("Flags", (), {"teacher": None, "student": None, "text": None}))
import models, torch.nn.functional as F
from distillation import Distillation, check_logits
labels = parts.rows[:2].clone()
labels[:, :9] = -100
loss, _ = Distillation(parts.teacher, 256, ratio=0.0).loss(parts.student, parts.rows[:2], labels)
theirs = parts.student(parts.rows[:2]).logits[:, :-1, :256]
expected = F.cross_entropy(theirs.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
result["ce"] = [loss.item(), expected.item()]
parts.student.config.logit_scale = 0.5
try:
    check_logits(parts.student, parts.rows[:1])
except ValueError as error:
    result["refused"] = str(error)
print("RESULT" + json.dumps(result))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("losses_alone")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "examples/losses"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=out, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rsplit("RESULT", 1)[1])


def test_the_import_needs_nothing_but_torch(result: dict[str, Any]) -> None:
    standard = set(sys.stdlib_module_names)
    assert [name for name in result["loaded"] if name not in standard] == ["mkd"]
    assert result["megatron"] == []


def test_the_import_changes_nothing(result: dict[str, Any]) -> None:
    assert result["changed"] == []
    assert result["state"] == []


def test_the_import_leaves_the_kernels_out(result: dict[str, Any]) -> None:
    assert not result["kernels"]


def test_a_loss_without_megatron(result: dict[str, Any]) -> None:
    loss, gradient = result["loss"]
    assert loss == pytest.approx(3 * math.log(4))
    assert gradient == pytest.approx([1.25, 1.25, 1.25, 0.75, 0.0])


def test_the_plain_loop_learns(result: dict[str, Any]) -> None:
    assert len(result["plain"]) == 20
    assert result["plain"][-1] < 0.9 * result["plain"][0]


def test_the_trainer_learns(result: dict[str, Any]) -> None:
    lines = [line for line in result["trainer"] if "kd" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["kd"] < lines[0]["kd"]
    for line in lines:
        assert line["loss"] == pytest.approx(0.1 * line["ce"] + 0.9 * line["kd"], rel=1e-4)


def test_both_examples_write_folders_that_transformers_reads(result: dict[str, Any]) -> None:
    assert result["read"] == [32, 32]


def test_the_examples_cross_entropy_is_that_of_the_model(result: dict[str, Any]) -> None:
    ours, theirs = result["ce"]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert "are not its final hidden states times its LM head" in result["refused"]
