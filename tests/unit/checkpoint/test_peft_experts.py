"""Adapters of routed experts in PEFT folders: peft computes the same model from a folder of mkd, and mkd from one of
peft."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from mkd.checkpoint.adapters.experts import expert_parameters
from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.adapters.merged import MergedFolder
from mkd.checkpoint.adapters.peft_folder import PeftFolder, open_hf_folder, write_peft_folder
from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.config.lora import LoraOptions
from mkd.errors import MkdCheckpointError
from tests.dist.test_hf_families import MODELS, NO_SPECIAL_TOKENS, TOKENS
from tests.support.hf_folders import change_json, make_model
from tests.support.slow import slow
from tests.support.tolerance import LOGITS

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
UNGATED = ["experts.up_proj", "experts.down_proj"]
CASES = {
    "mixtral": ["all-linear", *EXPERTS],
    "glm 4.5": ["all-linear", *EXPERTS],
    "qwen3-next": ["all-linear", *EXPERTS],
    "llama 4": ["experts.gate_up_proj", "gate_proj"],
    "gpt-oss": EXPERTS,
    "nemotron 3 nano": ["all-linear", *UNGATED],
    "nemotron-h": ["all-linear"],
}
"""Separate tensors of each expert, dense layers with names of old experts, shared experts and a delta net, tensors
[experts, in, out] of two kinds, experts without gate beside Mamba layers, and a dense model with names of layers that
differ from those in the folder."""


@dataclass(frozen=True)
class Random:
    """Random adapters of rank 2 with a scale of 1.5."""

    shapes: dict[str, tuple[int, ...]]
    """Layer -> (out, in), or (experts, out, in)."""
    scale: float = 1.5

    @property
    def layers(self) -> list[str]:
        return sorted(self.shapes)

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        *experts, out, inputs = self.shapes[layer]
        generator = torch.Generator().manual_seed(self.layers.index(layer))
        a, b = torch.rand(*experts, 2, inputs, generator=generator), torch.rand(*experts, out, 2, generator=generator)
        return a - 0.5, (b - 0.5) / 8

    def fingerprint(self) -> str:
        return "adapters"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFFolder]:
    found = {}
    for name in CASES:
        root = tmp_path_factory.mktemp("experts") / "hf"
        make_model(root, **{**NO_SPECIAL_TOKENS, **MODELS[name]})
        found[name] = HFFolder(root, "--hf")
    return found


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits


def merged_logits(folder: HFFolder, root: Path) -> Tensor:
    """transformers' logits of the merged weights, through a Megatron checkpoint."""
    import_hf(folder, root / "megatron")
    export_hf(MegatronFolder(root / "megatron", "--load"), root / "out")
    return logits(load(root / "out"))


@pytest.mark.parametrize(
    "name", ["glm 4.5", "llama 4", "gpt-oss", "nemotron 3 nano", *slow(["mixtral", "qwen3-next", "nemotron-h"])]
)
def test_peft_reads_what_mkd_writes(folders: dict[str, HFFolder], name: str, tmp_path: Path) -> None:
    base = folders[name]
    family, args = read_architecture(base)
    experts = expert_parameters(family, args)
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in adapted_linears(family, args, LoraOptions(2, 3.0, tuple(CASES[name]))):
        for layer in linear.layers:
            out = sum(part.channels for part in linear.parts if part.layer == layer)
            shapes[layer] = (*([linear.experts] if linear.experts else []), out, linear.inputs)
    adapters = Random(shapes)
    (tmp_path / "peft").mkdir()
    sizes: dict[str, Any] = {"rank": 2, "alpha": 3.0, "base": str(base.path), "has_whole_names": True}
    write_peft_folder(tmp_path / "peft", adapters, **sizes, experts=experts, named=family.module_name)
    plain = load(base.path)
    before = logits(plain)
    model = PeftModel.from_pretrained(plain, tmp_path / "peft")
    names = {param for param, _ in model.named_parameters() if "lora_" in param}
    assert len(names) == 2 * len(shapes)
    found = logits(model)
    assert (found - before).abs().max() > 100 * LOGITS
    assert (found - merged_logits(MergedFolder(base, adapters), tmp_path)).abs().max() < LOGITS
    again = PeftFolder(tmp_path / "peft", "--hf")
    assert again.layers == adapters.layers and again.scale == adapters.scale
    for layer in adapters.layers:
        assert all(map(torch.equal, again.factors(layer), adapters.factors(layer)))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama 4", EXPERTS),
        ("gpt-oss", EXPERTS[1:]),
        ("nemotron 3 nano", UNGATED),
        pytest.param("mixtral", EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_mkd_reads_what_peft_writes(
    folders: dict[str, HFFolder], name: str, targets: list[str], tmp_path: Path
) -> None:
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "in_proj"], target_parameters=targets)
    model = get_peft_model(load(folders[name].path), config).eval()
    with torch.no_grad():
        for param, value in model.named_parameters():
            if "lora_" in param:
                value.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(len(param)))
    expected = logits(model)
    model.save_pretrained(tmp_path / "peft")
    change_json(tmp_path / "peft/adapter_config.json", {"base_model_name_or_path": str(folders[name].path)})
    assert (merged_logits(open_hf_folder(tmp_path / "peft", "--hf"), tmp_path) - expected).abs().max() < LOGITS


def test_unknown_parameters(folders: dict[str, HFFolder], tmp_path: Path) -> None:
    base = folders["mixtral"]
    name = "model.layers.0.mlp.experts.down_proj"
    (tmp_path / "peft").mkdir()
    adapters = Random({name: (4, 48, 72)})
    sizes: dict[str, Any] = {"rank": 2, "alpha": 3.0, "base": str(base.path)}
    write_peft_folder(tmp_path / "peft", adapters, **sizes, experts=expert_parameters(*read_architecture(base)))
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["target_modules"] == [] and config["target_parameters"] == [name]
    for targets, message in (
        (["mlp.experts.gate_up_proj"], r"lora_A\.weight has shape \[8, 72\], \[8, 48\] fits"),
        ([], r"no linear layer model\.layers\.0\.mlp\.experts; adapter_config\.json names no parameter"),
        ("all", '"target_parameters" is all; a list of names is needed'),
        ([1], "a list of names is needed"),
    ):
        change_json(tmp_path / "peft/adapter_config.json", {"target_parameters": targets})
        with pytest.raises(MkdCheckpointError, match=message):
            PeftFolder(tmp_path / "peft", "--hf")
