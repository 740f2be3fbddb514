"""Vision-language folders: their text model has transformers' logits and gradients in each layout, and an export
carries the rest over.

transformers runs the whole model on text, so that positions of three axes (mrope) are compared, too. Without `-m slow`,
logits are compared on one rank and TP2 x PP2, and steps of two models with TP and SP.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from tests.dist.test_family_steps import References, assert_two_steps
from tests.dist.test_hf_families import LAYOUTS, TOKENS, equal, errors_of_model
from tests.support.dist.gpt_models import layout
from tests.support.slow import slow
from tests.support.tolerance import LOGITS
from tests.support.vision_language import PUBLISHED, WHOLE, make_whole

FEW = ["qwen2_5_vl", "gemma3"]
"""Models of every layout without `-m slow`: one with mrope, one with tensors under other names."""
EXPERTS = ["qwen3_vl_moe", PUBLISHED, "llama4"]
ALIKE = ["glm46v", "llava_next", "llava_onevision", "idefics3"]
"""Models whose text model is that of another one."""
OTHERS = [name for name in WHOLE if name not in ALIKE]
SLOW_LAYOUTS = [
    pytest.param("TP1", ALIKE, marks=pytest.mark.slow),
    *(pytest.param(name, WHOLE, marks=pytest.mark.slow) for name in ("TP2", "PP2", "TP2 x PP2")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, torch.Tensor]]:
    """name -> (Hugging Face folder, its Megatron checkpoint, transformers' logits)."""
    found = {}
    for name in WHOLE:
        root = tmp_path_factory.mktemp("vision_language")
        model = make_whole(root / "hf", name)
        import_hf(HFFolder(root / "hf", "--hf"), root / "megatron")
        with torch.no_grad():
            found[name] = (root / "hf", root / "megatron", model(TOKENS).logits)
    return found


def errors_of(rank: int, world_size: int, folders: dict[str, Any], tp: int, pp: int, ep: int = 1) -> dict[str, float]:
    """(model, source) -> largest error of the logits, on the ranks that have them."""
    errors: dict[str, float] = {}
    with layout(tp, pp, ep=ep, etp=tp):
        for name, found in folders.items():
            errors.update(errors_of_model(name, *found, ep))
    return errors


@pytest.mark.parametrize(("name", "models"), [("TP1", OTHERS), ("TP2 x PP2", FEW), *SLOW_LAYOUTS])
def test_logits(gloo_pool: Any, folders: dict[str, Any], name: str, models: Iterable[str]) -> None:
    tp, pp, _ = LAYOUTS[name]
    folders = {name: folders[name] for name in models}
    found = [errors for errors in gloo_pool(tp * pp).run(errors_of, folders, tp, pp) if errors]
    assert len(found) == tp
    for errors in found:
        assert len(errors) == 2 * len(folders)
        assert {name: error for name, error in errors.items() if not error <= LOGITS} == {}


def test_logits_with_experts_on_two_ranks(gloo_pool: Any, folders: dict[str, Any]) -> None:
    found = gloo_pool(2).run(errors_of, {name: folders[name] for name in EXPERTS}, 1, 1, 2)
    assert all(len(errors) == 2 * len(EXPERTS) and max(errors.values()) <= LOGITS for errors in found), found


@pytest.mark.parametrize("name", WHOLE)
def test_round_trip(folders: dict[str, Any], name: str, tmp_path: Path) -> None:
    hf, checkpoint, expected = folders[name]
    export_hf(MegatronFolder(checkpoint, "--load"), tmp_path / "out")
    assert equal(hf, tmp_path / "out")
    for file in ("config.json", "preprocessor_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads((hf / file).read_text())
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected)
    assert model.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (2, 26)


@pytest.mark.parametrize("name", ["gemma3", *slow([name for name in WHOLE if name != "gemma3"])])
def test_round_trip_in_bf16(name: str, tmp_path: Path) -> None:
    make_whole(tmp_path / "hf", name, torch.bfloat16)
    import_hf(HFFolder(tmp_path / "hf", "--hf"), tmp_path / "megatron")
    export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out")
    assert equal(tmp_path / "hf", tmp_path / "out")
    export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "wide", torch.float32)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["text_config"].get("dtype", "float32") == "float32"


class WholeReferences(References):
    """See `References`; of whole models on text."""

    model_class = AutoModelForImageTextToText

    def make(self, root: Path, name: str, sizes: dict[str, Any]) -> None:
        make_whole(root / "student", name)
        text = WHOLE[name]["text_config"]
        layers = {key: text[key] * 2 for key in ("layer_types", "no_rope_layers") if key in text}
        make_whole(root / "teacher", name, intermediate_size=60, num_hidden_layers=4, **layers)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> WholeReferences:
    return WholeReferences(tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("layout_name", ["TP2, SP, packed", *slow(["packed", "TP2", "PP2", "CP2, packed"])])
@pytest.mark.parametrize("names", [FEW, *slow([[name for name in WHOLE if name not in FEW]])])
def test_two_steps(gloo_pool: Any, references: WholeReferences, layout_name: str, names: list[str]) -> None:
    models = {name: {**WHOLE[name]["text_config"], "model_type": WHOLE[name]["model_type"]} for name in names}
    assert_two_steps(gloo_pool, references, models, layout_name)


@pytest.mark.parametrize("layout_name", ["EP2", *slow(["TP2, SP, packed"])])
def test_two_steps_of_experts(gloo_pool: Any, references: WholeReferences, layout_name: str) -> None:
    models = {name: {**WHOLE[name]["text_config"], "model_type": WHOLE[name]["model_type"]} for name in EXPERTS}
    assert_two_steps(gloo_pool, references, models, layout_name)
