"""PEFT folders: what is written is read, and what mkd does not compute is refused before a tensor is read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mkd.checkpoint.adapters.peft_folder import PeftFolder, is_peft_folder, open_hf_folder, write_peft_folder
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.safetensors_files import write_tensors
from mkd.errors import MkdCheckpointError
from tests.support.hf_folders import make_llama, make_model

LAYERS = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj")
SHAPES = {LAYERS[0]: (48, 72), LAYERS[1]: (96, 48)}


@dataclass(frozen=True)
class Written:
    """Random adapters of rank 2."""

    layers: tuple[str, ...] = LAYERS
    scale: float = 1.5

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.layers.index(layer))
        out, inputs = SHAPES[layer]
        return torch.randn(2, inputs, generator=generator), torch.randn(out, 2, generator=generator)

    def fingerprint(self) -> str:
        return "adapters"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "model", num_hidden_layers=2)


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    path = tmp_path / "peft"
    path.mkdir()
    write_peft_folder(path, Written(), rank=2, alpha=3.0, base=str(base))
    return path


def changed(folder: Path, **keys: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return folder


def test_what_is_written_is_read(base: Path, folder: Path) -> None:
    assert is_peft_folder(folder) and not is_peft_folder(base)
    found = PeftFolder(folder, "--hf")
    assert (found.rank, found.alpha, found.scale, found.layers) == (2, 3, 1.5, list(LAYERS))
    for layer in LAYERS:
        assert all(torch.equal(*pair) for pair in zip(found.factors(layer), Written().factors(layer), strict=True))


def test_merged_weights(base: Path, folder: Path) -> None:
    merged, plain = open_hf_folder(folder, "--hf"), HFFolder(base, "--hf")
    for name in plain.tensors:
        value, layer = plain.read(name), name.removesuffix(".weight")
        if layer in LAYERS:
            a, b = Written().factors(layer)
            value = (value.double() + 1.5 * b.double() @ a.double()).float()
        assert torch.allclose(merged.read(name), value, rtol=0.0, atol=1e-5), name
    name = f"{LAYERS[0]}.weight"
    part = merged.read(name, slice(3, 9), slice(5, 20))
    assert torch.allclose(part, merged.read(name)[3:9, 5:20], rtol=0.0, atol=1e-6)
    assert merged.read(name, slice(3, 9)).shape == (6, 72)


def test_scale_of_rslora(folder: Path) -> None:
    assert PeftFolder(changed(folder, use_rslora=True), "--hf").scale == pytest.approx(3 / 2**0.5)


def test_a_folder_beside_the_adapters(base: Path, folder: Path) -> None:
    (folder / "model").symlink_to(base)
    assert PeftFolder(changed(folder, base_model_name_or_path="model"), "--hf").base.tensors


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other method": ({"peft_type": "IA3"}, "\"peft_type\" is 'IA3'; only LORA is read"),
    "DoRA": ({"use_dora": True}, '"use_dora" is True; mkd has no such adapters'),
    "KaSA": ({"kasa_config": {"beta": 1e-4}}, '"kasa_config" is .*; mkd has no such adapters'),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, '"init_lora_weights" is .pissa_niter_4., with which PEFT also'),
    "OLoRA": ({"init_lora_weights": "olora"}, '"init_lora_weights" is .olora., with which PEFT also changes'),
    "ranks by layer": ({"rank_pattern": {"q_proj": 4}}, '"rank_pattern" is'),
    "other weights": ({"modules_to_save": ["lm_head"]}, '"modules_to_save" is'),
    "biases": ({"bias": "all"}, "\"bias\" is 'all'"),
    "no rank": ({"r": None}, '"r" is None; a number from 1 to 4096 is needed'),
    "large rank": ({"r": 10**9}, '"r" is 1000000000'),
    "rank as text": ({"r": "2"}, "\"r\" is '2'"),
    "alpha": ({"lora_alpha": float("nan")}, '"lora_alpha" is nan'),
    "another rank": ({"r": 3}, r"has shape \[2, 72\], \[3, 72\] fits"),
    "name of the hub": ({"base_model_name_or_path": "org/name"}, "not a folder here; mkd downloads nothing"),
    "no name": ({"base_model_name_or_path": None}, "must name the folder of the model"),
}


REFUSED |= {
    "a target removed": (
        {"target_modules": ["down_proj"]},
        r"adapter_model.safetensors has an adapter of model\.layers\.1\.self_attn\.q_proj, and PEFT leaves it out with "
        r'"target_modules" \[.down_proj.\] in adapter_config.json',
    ),
    "no targets": ({"target_modules": []}, "has an adapter of .*, and PEFT leaves it out with"),
    "a target added": (
        {"target_modules": ["down_proj", "q_proj", "k_proj"]},
        '"target_modules" has k_proj, and adapter_model.safetensors no adapter of such a layer',
    ),
    "another expression": (
        {"target_modules": r".*\.1\..*"},
        "has an adapter of model.layers.0.mlp.down_proj, and PEFT",
    ),
    "no expression": ({"target_modules": "("}, r"\"target_modules\" is '\(', no regular expression"),
    "endless": (
        {"target_modules": r"(.+)+\d!"},
        r"--hf .*peft: .*the regular expression .* does not end on model",
    ),
    "targets of another kind": ({"target_modules": 3}, '"target_modules" is 3; names or a regular expression needed'),
    "excluded": ({"exclude_modules": ["q_proj"]}, 'leaves it out with .*"exclude_modules"'),
    "other layers": ({"layers_to_transform": 0}, r'self_attn.q_proj, .*"layers_to_transform" \[0\]'),
    "layers of another list": (
        {"layers_to_transform": [0, 1], "layers_pattern": ["h", "blocks"]},
        r'leaves it out with .*"layers_to_transform" \[0, 1\], "layers_pattern" \[.h., .blocks.\]',
    ),
    "lists without layers": ({"layers_pattern": "layers"}, '"layers_pattern" is .*without "layers_to_transform"'),
    "lists of another kind": ({"layers_to_transform": 0, "layers_pattern": [3]}, '"layers_pattern" is .3.; names are'),
    "no expression of a list": (
        {"layers_to_transform": 0, "layers_pattern": "(?i)l"},
        "is '.*l', no regular expression",
    ),
    "layers of an expression": (
        {"target_modules": ".*q_proj", "layers_to_transform": []},
        '"layers_to_transform" is .., which PEFT refuses beside "target_modules" ..*q_proj.',
    ),
    "layers of another kind": ({"layers_to_transform": ["0"]}, '"layers_to_transform" is .*; numbers are needed'),
}


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(down_proj|q_proj)"},
        {"target_modules": None},
        {"target_modules": ["model.layers.0.mlp.down_proj", "self_attn.q_proj"]},
        {"target_modules": ["down_proj", "q_proj", "of_another_model"]},
        {"layers_to_transform": [0, 1], "exclude_modules": ["k_proj"]},
        {"target_modules": ["down_proj", "q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"layers_to_transform": []},
        {"target_modules": ["model.layers.0.mlp.down_proj", "q_proj"], "layers_to_transform": [1]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    ],
)
def test_targets_that_agree_with_the_tensors(folder: Path, keys: dict[str, Any]) -> None:
    assert PeftFolder(changed(folder, **keys), "--hf").layers == list(LAYERS)


def test_targets_that_name_routed_experts(tmp_path: Path) -> None:
    """A file has a matrix of each expert; a module of transformers 5 has one parameter, which PEFT leaves out."""
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    base = make_model(tmp_path / "mixture", "qwen3_moe", **sizes)
    assert any(name.endswith("experts.0.gate_proj.weight") for name in HFFolder(base, "--hf").tensors)
    (path := tmp_path / "peft").mkdir()
    write_peft_folder(path, Written(LAYERS[1:]), rank=2, alpha=3.0, base=str(base))
    assert PeftFolder(changed(path, target_modules=["q_proj", "gate_proj"]), "--hf").layers == list(LAYERS[1:])


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(MkdCheckpointError, match=message):
        open_hf_folder(changed(folder, **keys), "--hf")


TENSORS: dict[str, tuple[dict[str, Tensor], str]] = {
    "another name": ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "is not a factor of a linear layer"),
    "integers": (
        {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": torch.zeros(2, 72, dtype=torch.int32)},
        "is not a factor",
    ),
    "no such layer": ({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, "has no linear layer x"),
    "A alone": (
        {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": torch.zeros(2, 72)},
        "down_proj has lora_A alone",
    ),
    "nothing": ({}, "has no adapters"),
}


@pytest.mark.parametrize(("tensors", "message"), TENSORS.values(), ids=TENSORS)
def test_refused_tensors(folder: Path, tensors: dict[str, Tensor], message: str) -> None:
    write_tensors(folder / "adapter_model.safetensors", tensors)
    with pytest.raises(MkdCheckpointError, match=message):
        open_hf_folder(folder, "--hf")


def test_pickled_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(MkdCheckpointError, match=r"there is no adapter_model\.safetensors"):
        open_hf_folder(folder, "--hf")


def test_truncated_weights(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(MkdCheckpointError, match="is truncated"):
        open_hf_folder(folder, "--hf")
