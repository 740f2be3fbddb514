"""tools/prune.py depth."""

import json

import pytest
import torch

from mkd.checkpoint.hf_check import check_tensors, read_architecture
from mkd.checkpoint.hf_folder import HFFolder
from tests.hf_folders import add_tokenizer, change_weights, make_llama, read_weights, reference_logits
from tools import prune


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
def test_wrong_choice(teacher, tmp_path, capsys, choice, words):
    assert prune.main(["depth", "--hf", str(teacher), "--out", str(tmp_path / "student"), *choice]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


def test_incomplete_teacher_and_taken_output(teacher, tmp_path, capsys):
    broken = make_llama(tmp_path / "broken")
    change_weights(broken, {"model.norm.weight": None})
    assert prune.main(["depth", "--hf", str(broken), "--out", str(tmp_path / "student"), "--every", "2"]) == 1
    assert "model.norm.weight" in capsys.readouterr().err
    assert prune.main(["depth", "--hf", str(teacher), "--out", str(broken), "--every", "2"]) == 1
    assert f"--out {broken} exists" in capsys.readouterr().err
    assert not (tmp_path / "student").exists()
