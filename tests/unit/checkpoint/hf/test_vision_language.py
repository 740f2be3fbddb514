"""Folders of vision-language models: what is read, refused, exported and pruned."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from mkd.checkpoint.adapters.peft_folder import open_hf_folder, write_peft_folder
from mkd.checkpoint.describe import describe
from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.prune.depth import PrunableTeacher, select_layers
from mkd.checkpoint.staged_reads import Staging
from mkd.cli import convert
from mkd.cli.prune import main as prune
from mkd.errors import MkdCheckpointError
from tests.support.hf_folders import add_tokenizer, change_json, change_weights, read_weights
from tests.support.vision_language import PUBLISHED, WHOLE, make_whole

TOKENS = torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> folder, which tests copy."""
    found = {}
    for name in ("qwen2_5_vl", "gemma3", "mistral3"):
        found[name] = tmp_path_factory.mktemp("whole") / name
        make_whole(found[name], name)
    return found


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a Gemma 3."""
    return Path(shutil.copytree(saved["gemma3"], tmp_path / "hf"))


@pytest.fixture(scope="module")
def checkpoint(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3, imported from `saved`."""
    save = tmp_path_factory.mktemp("imported") / "megatron"
    import_hf(HFFolder(saved["gemma3"], "--hf"), save)
    return save


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
        return model(TOKENS).logits


def read(folder: Path) -> HFFolder:
    """The folder, checked."""
    opened = HFFolder(folder, "--hf")
    check_tensors(opened, read_architecture(opened)[0])
    return opened


def refused(folder: Path, text: str) -> None:
    with pytest.raises(MkdCheckpointError, match=text) as error:
        read(folder)
    assert f"--hf {folder}" in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_of_the_text_model(saved: dict[str, Path]) -> None:
    for name, prefix in {"gemma3": "language_model.model.", "qwen2_5_vl": "model."}.items():
        opened = read(saved[name])
        weights = read_weights(saved[name])
        assert torch.equal(opened.read("model.norm.weight"), weights[f"{prefix}norm.weight"])
        assert len(opened.tensors) + len(opened.carried) == len(weights)
        assert not any("vis" in tensor or "projector" in tensor for tensor in opened.tensors)


def test_names_of_the_modules(folder: Path) -> None:
    """A folder whose tensors have the names of transformers' modules."""
    weights = read_weights(folder)
    renamed = {f"model.{name.replace('language_model.model.', 'language_model.')}": t for name, t in weights.items()}
    change_weights(folder, dict.fromkeys(weights) | renamed)
    assert read(folder).names.stored("model.norm.weight") == "model.language_model.norm.weight"
    assert torch.equal(read(folder).read("model.norm.weight"), weights["language_model.model.norm.weight"])


def test_tower_of_other_names(folder: Path) -> None:
    change_weights(folder, {"audio_tower.weight": torch.ones(2)})
    refused(folder, r"tensor audio_tower\.weight is not part of Gemma3ForCausalLM")


def test_two_tensors_of_one_name(folder: Path) -> None:
    change_weights(folder, {"model.norm.weight": torch.ones(48)})
    refused(folder, r"two tensors model\.norm\.weight of the text model")


def test_text_tensor_is_missing(folder: Path) -> None:
    change_weights(folder, {"language_model.model.layers.1.mlp.up_proj.weight": None})
    refused(folder, r"tensor model\.layers\.1\.mlp\.up_proj\.weight of shape \[72, 48\] is missing")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"text_config": None}, r'config.json has no "text_config" \(Gemma3ForConditionalGeneration\)'),
        ({"text_config": ["a"] * 100}, r'config.json: "text_config" is .*; an object is needed'),
        ({"model_type": "llava"}, r'"model_type" is .llava., "architectures" has Gemma3ForConditionalGeneration'),
        (
            {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"},
            r'"architectures" is .*PaliGemma.*nearest by name is Gemma3ForConditionalGeneration',
        ),
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"},
            r'"architectures" is .*Gemma3n.*nearest by name is Gemma3ForConditionalGeneration',
        ),
        (
            {"architectures": ["Cohere2VisionForConditionalGeneration"], "model_type": "cohere2_vision"},
            r'"architectures" is .*Cohere2Vision.*logits without text_config.logit_scale',
        ),
    ],
)
def test_invalid_configuration(folder: Path, changes: dict[str, Any], text: str) -> None:
    change_json(folder / "config.json", changes)
    refused(folder, text)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("gemma3", {"num_hidden_layers": 10**9}, r'"num_hidden_layers" is 1000000000; at most 10000'),
        (
            "gemma3",
            {"hidden_size": -1},
            r'"hidden_size" is -1; it must be at least 1 \(text model of Gemma3ForConditionalGeneration; '
            r"read as Gemma3ForCausalLM\)",
        ),
        ("gemma3", {"vocab_size": "x"}, r'"vocab_size" is .x.; a int is needed'),
        (
            "gemma3",
            {"model_type": "gemma2"},
            r'"text_config.model_type" is .gemma2.; Gemma3ForCond\w+ has .gemma3_text',
        ),
        ("gemma3", {"text_config": {"a": 1}}, '"text_config" is'),
        ("mistral3", {"model_type": "mistral4"}, r'"model_type" is .mistral4.; known .*nearest by name is Mistral'),
        ("qwen2_5_vl", {"rope_parameters": {"rope_type": "su", "mrope_section": [1]}}, r'rope_type" is .su.'),
    ],
)
def test_invalid_text_configuration(
    saved: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any], text: str
) -> None:
    folder = Path(shutil.copytree(saved[name], tmp_path / "hf"))
    whole = json.loads((folder / "config.json").read_text())
    change_json(folder / "config.json", {"text_config": whole["text_config"] | changes})
    refused(folder, text)


def test_lm_head_without_a_word_about_ties(saved: dict[str, Path], tmp_path: Path) -> None:
    """transformers' default is tied, but an LM head that is stored is used; exports stay so."""
    folder = Path(shutil.copytree(saved["mistral3"], tmp_path / "hf"))
    change_json(folder / "config.json", {"tie_word_embeddings": None})
    assert read_architecture(read(folder))[1]["untie_embeddings_and_output_weights"]
    import_hf(read(folder), tmp_path / "megatron")
    export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_changed_text_in_a_whole_model(checkpoint: Path, saved: dict[str, Path], tmp_path: Path) -> None:
    """Other text weights, as after a training: the export has them, and the tower of the folder."""
    other = make_whole(tmp_path / "other", "gemma3")
    with torch.no_grad():
        for param in other.model.language_model.parameters():
            param.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    import_hf(HFFolder(tmp_path / "other", "--hf"), tmp_path / "megatron")
    shutil.copytree(checkpoint / "hf_assets", tmp_path / "megatron/hf_assets", dirs_exist_ok=True)
    export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out")
    trained, old, out = (read_weights(path) for path in (tmp_path / "other", saved["gemma3"], tmp_path / "out"))
    assert out.keys() == old.keys()
    for name, value in out.items():
        assert torch.equal(value, (trained if name.startswith("language_model.") else old)[name])


def test_export_without_the_folder(checkpoint: Path, saved: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "megatron"))
    record = copy / "hf_assets/whole_model.json"
    stored = json.loads(record.read_text())
    assert stored["folder"] == str(saved["gemma3"])

    def fails(text: str, base: str | None = None) -> None:
        with pytest.raises(MkdCheckpointError, match=text) as error:
            export_hf(MegatronFolder(copy, "--load"), tmp_path / "out", base=base)
        assert str(error.value).endswith("in --base of mkd convert export")  # exports during a training fail here, too
        assert not (tmp_path / "out").exists()

    record.write_text(json.dumps(stored | {"folder": str(tmp_path / "gone")}))
    fails(r"text model of a Gemma3ForConditionalGeneration in .*gone, which is not there any more: give the folder")
    for path in ("x" * 5000, "a\0b"):
        record.write_text(json.dumps(stored | {"folder": path}))
        fails("which is not there any more")
    fails("fingerprint", base=str(saved["mistral3"]))
    arguments = ["export", "--load", str(copy), "--hf", str(tmp_path / "given"), "--base", str(saved["gemma3"])]
    assert convert.main(arguments) == 0
    assert read_weights(tmp_path / "given").keys() == read_weights(saved["gemma3"]).keys()
    record.write_text(json.dumps({"folder": 3, "fingerprint": None}))
    fails("has no folder and fingerprint")
    record.unlink()
    fails(r"hf_assets/whole_model.json is missing")


def test_other_weights_in_the_folder(folder: Path, tmp_path: Path) -> None:
    import_hf(HFFolder(folder, "--hf"), tmp_path / "megatron")
    change_weights(folder, {"vision_tower.post_layernorm.bias": torch.zeros(32)})
    with pytest.raises(MkdCheckpointError, match=r"with fingerprint \w+, .* has \w+: give the folder"):
        export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out")


def test_base_of_a_text_model_alone(tmp_path: Path, checkpoint: Path, saved: dict[str, Path]) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "megatron"))
    (copy / "hf_assets/config.json").unlink()
    arguments = ["export", "--load", str(copy), "--hf", str(tmp_path / "out")]
    assert convert.main([*arguments, "--base", str(saved["gemma3"])]) == 1
    assert convert.main([*arguments, "--architecture", "Gemma3ForCausalLM"]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma3_text"


def test_inspect_and_verify(
    checkpoint: Path, saved: dict[str, Path], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    found = describe(str(saved["gemma3"]), None)
    assert found["architecture"] == "Gemma3ForCausalLM, the text model of Gemma3ForConditionalGeneration"
    assert "carried over" in found
    assert describe(None, str(checkpoint))["architecture"] == found["architecture"]
    arguments = ["--hf", str(saved["gemma3"]), "--load", str(checkpoint), "--length", "9", "--tolerance", "1e-4"]
    assert convert.main(["verify", *arguments]) == 0
    assert "max error of a logit" in capsys.readouterr().out


def test_adapters(saved: dict[str, Path], tmp_path: Path) -> None:
    """A PEFT folder of peft is read as the sum of weights, and one of mkd gives peft the same model."""
    base = AutoModelForImageTextToText.from_pretrained(saved["gemma3"], attn_implementation="eager")
    modules = r".*language_model.*(q_proj|down_proj)"
    adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=modules)).eval()
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name:
                param.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(len(name)))
        expected = adapted(TOKENS).logits
    adapted.save_pretrained(tmp_path / "peft")
    change_json(tmp_path / "peft/adapter_config.json", {"base_model_name_or_path": str(saved["gemma3"])})
    opened = open_hf_folder(tmp_path / "peft", "--hf")
    import_hf(opened, tmp_path / "megatron")
    export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out")
    assert torch.allclose(logits(tmp_path / "out"), expected, atol=1e-4)
    (tmp_path / "own").mkdir()
    adapters = opened._adapters
    sizes = {"rank": 2, "alpha": 6.0, "base": str(saved["gemma3"])}
    named = opened.vision_language.module_name
    write_peft_folder(tmp_path / "own", adapters, **sizes, has_whole_names=True, named=named)
    plain = AutoModelForImageTextToText.from_pretrained(saved["gemma3"], attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(PeftModel.from_pretrained(plain, tmp_path / "own")(TOKENS).logits, expected)


def test_adapters_of_the_tower(saved: dict[str, Path], tmp_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(saved["gemma3"])
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "peft")
    change_json(tmp_path / "peft/adapter_config.json", {"base_model_name_or_path": str(saved["gemma3"])})
    with pytest.raises(MkdCheckpointError, match=r"the text model of .* has no linear layer model\.vision_tower"):
        open_hf_folder(tmp_path / "peft", "--hf")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "mistral3"])
def test_prune(saved: dict[str, Path], tmp_path: Path, name: str) -> None:
    teacher = PrunableTeacher(str(saved[name]))
    teacher.write_student(tmp_path / "depth", select_layers(2, layers="1"))
    before, after = read_weights(saved[name]), read_weights(tmp_path / "depth")
    for key, value in after.items():
        kept = key if "vis" in key else key.replace("layers.0.", "layers.1.")
        assert torch.equal(value, before[kept])
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "depth", attn_implementation="eager")
    assert model.config.text_config.num_hidden_layers == 1
    arguments = ["width", "--hf", str(saved[name]), "--out", str(tmp_path / "width")]
    assert prune([*arguments, "--ffn-hidden-size", "40"]) == 0
    assert logits(tmp_path / "width").isfinite().all()
    assert read_weights(tmp_path / "width").keys() == before.keys()


def test_prune_by_activations(folder: Path, tmp_path: Path) -> None:
    add_tokenizer(folder, ["<unk>", *(f"w{number}" for number in range(130))])
    (tmp_path / "text.jsonl").write_text('{"text": "w1"}\n{"text": "w5"}\n')
    arguments = ["width", "--hf", str(folder), "--out", str(tmp_path / "out"), "--num-attention-heads", "2"]
    assert prune([*arguments, "--importance", "activation", "--data", str(tmp_path / "text.jsonl")]) == 0
    assert logits(tmp_path / "out").isfinite().all()


def test_projector_has_a_width(saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["width", "--hf", str(saved["gemma3"]), "--out", str(tmp_path / "out"), "--hidden-size", "24"]
    assert prune(arguments) == 1
    assert "--hidden-size is 24: the projector of Gemma3ForConditionalGeneration" in capsys.readouterr().err


def test_orientation_of_experts(tmp_path: Path) -> None:
    """Both orders of the axes are the same model; an export of a changed model keeps that of the folder."""
    for name in ("qwen3_vl_moe", PUBLISHED):
        make_whole(tmp_path / name, name)
    plain, published = read(tmp_path / "qwen3_vl_moe"), read(tmp_path / PUBLISHED)
    assert not plain.transposed and len(published.transposed) == 4
    assert plain.tensors == published.tensors
    for name in published.transposed:
        rows, cols = slice(1, 3), slice(5, 20)
        assert torch.equal(plain.read(name), published.read(name))
        assert torch.equal(plain.read(name, rows, cols), published.read(name, rows, cols))
        staged = [folder.read(name, rows, staging=Staging(torch.device("cpu"))) for folder in (plain, published)]
        assert torch.equal(staged[0], staged[1]) and torch.equal(staged[0], plain.read(name, rows))
        whole = read_weights(tmp_path / PUBLISHED)[published.names.stored(name)]
        assert torch.equal(whole.transpose(1, 2), published.read(name))
    PrunableTeacher(str(tmp_path / PUBLISHED)).write_student(tmp_path / "depth", select_layers(2, layers="1"))
    before, after = read_weights(tmp_path / PUBLISHED), read_weights(tmp_path / "depth")
    for key, value in after.items():
        assert torch.equal(value, before[key if ".visual." in key else key.replace("layers.0.", "layers.1.")]), key
    change_weights(tmp_path / PUBLISHED, {next(key for key in before if key.endswith("0.mlp.experts.down_proj")): None})
    refused(tmp_path / PUBLISHED, r"tensor model\.layers\.0\.mlp\.experts")


@pytest.mark.parametrize(("width", "square"), [(24, "gate_up_proj"), (48, "down_proj")])
def test_square_experts(tmp_path: Path, width: int, square: str) -> None:
    """transformers 5 exchanges the axes of no square tensor; one that it wrote itself is read."""
    expected = make_whole(tmp_path / "new", "qwen3_vl_moe", moe_intermediate_size=width)
    opened = read(tmp_path / "new")
    stored = opened.read(f"model.layers.1.mlp.experts.{square}")
    assert torch.equal(stored, getattr(expected.model.language_model.layers[1].mlp.experts, square))
    make_whole(tmp_path / "old", PUBLISHED, moe_intermediate_size=width)
    refused(tmp_path / "old", rf"experts\.{square} of shape .* is \[experts, in, out\] .*transformers 5 reads")


def test_every_architecture_is_tried() -> None:
    from mkd.checkpoint.hf.families.vision_language import VISION_LANGUAGE

    assert {known.model_type for known in VISION_LANGUAGE} == {sizes["model_type"] for sizes in WHOLE.values()}
