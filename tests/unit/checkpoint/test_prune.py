"""tools/prune.py depth."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.cli import prune
from tests.support.hf_folders import (
    add_tokenizer,
    change_json,
    change_weights,
    make_llama,
    make_model,
    read_weights,
    reference_logits,
)
from tests.support.hf_models import LATENT_SIZES
from tests.support.tolerance import FP32, assert_close_norm


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = make_llama(tmp_path_factory.mktemp("prune") / "teacher", shard_size="60KB", tie_word_embeddings=True)
    add_tokenizer(path, ["a", "b"])
    return path


@pytest.mark.parametrize(
    ("choice", "layers"),
    [
        (["--every", "2"], [0, 2]),
        (["--every", "3"], [0, 3]),
        (["--every", "9"], [0]),
        (["--layers", "1,2,3"], [1, 2, 3]),
    ],
)
def test_depth(teacher, tmp_path, choice, layers):
    student = tmp_path / "student"
    assert prune.main(["depth", "--hf", str(teacher), "--out", str(student), *choice]) == 0
    old, new = read_weights(teacher), read_weights(student)
    per_layer = sum(name.startswith("model.layers.0.") for name in old)
    assert len(new) == len(old) - (4 - len(layers)) * per_layer
    for name, tensor in new.items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(layers[int(parts[2])])
        assert torch.equal(tensor, old[".".join(parts)]), name
    config = json.loads((student / "config.json").read_text())
    assert config == json.loads((teacher / "config.json").read_text()) | {"num_hidden_layers": len(layers)}
    assert HFFolder(student, "--hf").tokenizer_hash() == HFFolder(teacher, "--hf").tokenizer_hash() is not None
    family, _ = read_architecture(HFFolder(student, "--hf"))
    check_tensors(HFFolder(student, "--hf"), family)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert not torch.allclose(reference_logits(student, tokens), reference_logits(teacher, tokens))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (["--every", "0"], ["--every", "0"]),
        (["--layers", "0,4"], ["--layers", "0,4", "3"]),
        (["--layers", "1,0"], ["--layers", "1,0"]),
        (["--layers", "1,1"], ["--layers", "1,1"]),
        (["--layers", "a"], ["--layers", "'a'"]),
        (["--layers", ""], ["--layers", "''"]),
    ],
)
def test_invalid_selection(teacher, tmp_path, capsys, choice, words):
    assert prune.main(["depth", "--hf", str(teacher), "--out", str(tmp_path / "student"), *choice]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


def test_incomplete_teacher_and_existing_output(teacher, tmp_path, capsys):
    broken = make_llama(tmp_path / "broken")
    change_weights(broken, {"model.norm.weight": None})
    assert prune.main(["depth", "--hf", str(broken), "--out", str(tmp_path / "student"), "--every", "2"]) == 1
    assert "model.norm.weight" in capsys.readouterr().err
    assert prune.main(["depth", "--hf", str(teacher), "--out", str(broken), "--every", "2"]) == 1
    assert f"--out {broken} exists" in capsys.readouterr().err
    assert not (tmp_path / "student").exists()


WINDOWS = {
    "intermediate_size": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
DENSE_FIRST = {
    **LATENT_SIZES,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}

SOME_MIXTURES = {
    "moe_layers": [0, 3],
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 40,
    "intermediate_size": 24,
}


MIXERS = {"layers_block_type": ["mlp", "mamba", "mamba", "attention"], "mamba_num_heads": 4, "n_groups": 2}


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("qwen2", {}),
        ("gpt_oss", WINDOWS),
        ("deepseek_v3", DENSE_FIRST),
        ("qwen3_5_text", {}),
        ("nemotron_h", MIXERS),
        ("llama4_text", SOME_MIXTURES),
    ],
    ids=lambda v: str(v)[:9],
)
def test_layers_of_different_kinds(tmp_path, model_type, sizes):
    """The student computes the same as the teacher's model without the removed layers."""
    folder, student, layers = make_model(tmp_path / "teacher", model_type, **sizes), tmp_path / "student", [1, 3]
    if model_type == "gpt_oss":
        change_json(folder / "config.json", {"layer_types": None})  # the default: a window in every second layer
    assert prune.main(["depth", "--hf", str(folder), "--out", str(student), "--layers", "1,3"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in layers])
    model.config.num_hidden_layers = len(layers)
    if model_type == "nemotron_h":
        model.config.layers_block_type = [sizes["layers_block_type"][layer] for layer in layers]
    elif (kinds := getattr(model.config, "layer_types", None)) is not None:
        model.config.layer_types = [kinds[layer] for layer in layers]
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    assert_close_norm(reference_logits(student, tokens), expected, FP32, model_type)


def test_only_dense_layers(tmp_path, capsys):
    folder = make_model(tmp_path / "teacher", "deepseek_v3", **DENSE_FIRST)
    assert prune.main(["depth", "--hf", str(folder), "--out", str(tmp_path / "student"), "--layers", "0,1"]) == 1
    assert "first_k_dense_replace" in capsys.readouterr().err and not (tmp_path / "student").exists()
