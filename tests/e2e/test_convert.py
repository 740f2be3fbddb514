"""tools/convert.py: Hugging Face folder -> Megatron checkpoint -> Hugging Face folder."""

import json
import shutil

import pytest
import torch
from megatron.training.checkpointing import load_args_from_checkpoint
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.families import family_of
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.hf.model_card import model_card
from mkd.checkpoint.megatron.folder import TRACKER, MegatronFolder
from mkd.checkpoint.megatron.integrity import file_hash
from mkd.config.flags import default_arguments
from mkd.errors import MkdCheckpointError
from tests.support.e2e.small_job import ROOT, run
from tests.support.hf_folders import (
    LLAMA3_ROPE,
    add_tokenizer,
    change_json,
    change_weights,
    make_llama,
    read_weights,
    reference_logits,
)

TOKENS = torch.randint(0, 131, (2, 96), generator=torch.Generator().manual_seed(1))
MODELS = {
    "untied fp32 in shards": {"rope_parameters": LLAMA3_ROPE, "shard_size": "60KB"},
    "tied bf16": {"tie_word_embeddings": True, "dtype": torch.bfloat16, "num_hidden_layers": 2},
}


def convert(*words, by_itself=False):
    return run(list(map(str, words)), script=ROOT / "tools" / "convert.py", by_itself=by_itself)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> (Hugging Face folder, its Megatron checkpoint)."""
    pairs = {}
    for name, sizes in MODELS.items():
        root = tmp_path_factory.mktemp("convert")
        make_llama(root / "hf", **sizes)
        add_tokenizer(root / "hf", ["a", "b"])
        import_hf(HFFolder(root / "hf", "--hf"), root / "megatron")
        pairs[name] = (root / "hf", root / "megatron")
    return pairs


@pytest.fixture
def checkpoint(folders, tmp_path):
    """A copy of the first checkpoint, to change."""
    return shutil.copytree(folders["untied fp32 in shards"][1], tmp_path / "megatron")


@pytest.mark.parametrize("model", MODELS)
def test_round_trip_is_bit_equal(folders, model, tmp_path):
    original, checkpoint = folders[model]
    out = tmp_path / "out"
    export_hf(MegatronFolder(checkpoint, "--load"), out)
    before, after = read_weights(original), read_weights(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    for name in ("generation_config.json", "tokenizer.json"):
        assert json.loads((out / name).read_text()) == json.loads((original / name).read_text()), name
    config = json.loads((original / "config.json").read_text())
    for_transformers_4 = family_of(config).config_for_transformers_4(config)
    assert json.loads((out / "config.json").read_text()) == for_transformers_4
    assert for_transformers_4["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert list(tmp_path.iterdir()) == [out]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, reference_logits(original, TOKENS))


@pytest.mark.parametrize("model", MODELS)
def test_export_without_assets_makes_the_config(folders, model, tmp_path):
    original, checkpoint = folders[model]
    copy = shutil.copytree(checkpoint, tmp_path / "megatron", ignore=shutil.ignore_patterns("hf_assets"))
    export_hf(MegatronFolder(copy, "--load"), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(reference_logits(tmp_path / "out", TOKENS), reference_logits(original, TOKENS))


@pytest.mark.parametrize("groups", [None, 1, 4])
@pytest.mark.parametrize("has_assets", [True, False])
def test_as_many_key_value_heads_as_heads(tmp_path, groups, has_assets):
    # Megatron's default is 1, and it writes the number of heads there when it counts operations.
    original = make_llama(tmp_path / "hf", num_attention_heads=4, num_key_value_heads=4)
    import_hf(HFFolder(original, "--hf"), tmp_path / "megatron")
    if not has_assets:
        shutil.rmtree(tmp_path / "megatron" / "hf_assets")
    folder = MegatronFolder(tmp_path / "megatron", "--load")
    folder.args.num_query_groups = groups
    export_hf(folder, tmp_path / "out")
    assert torch.equal(reference_logits(tmp_path / "out", TOKENS), reference_logits(original, TOKENS))


def test_dtypes(folders, tmp_path):
    original, _ = folders["untied fp32 in shards"]
    done = convert("import", "--hf", original, "--save", tmp_path / "megatron", "--dtype", "bf16", by_itself=True)
    assert done.status == 0, done.errors
    assert (tmp_path / "megatron" / TRACKER).read_text() == "release"
    done = convert("export", "--load", tmp_path / "megatron", "--hf", tmp_path / "out", "--dtype", "fp16")
    assert done.status == 0, done.errors
    before, after = read_weights(original), read_weights(tmp_path / "out")
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.bfloat16().half()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_megatron_reads_the_arguments_of_the_checkpoint(folders):
    original, checkpoint = folders["untied fp32 in shards"]
    args = default_arguments()
    args.load = str(checkpoint)
    load_args_from_checkpoint(args)
    _, expected = read_architecture(HFFolder(original, "--hf"))
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "kv_channels", "rotary_base"):
        assert getattr(args, name) == expected[name], name
    assert args.padded_vocab_size == 256


def assert_refused(checkpoint, out, *words):
    with pytest.raises(MkdCheckpointError) as caught:
        export_hf(MegatronFolder(checkpoint, "--load"), out)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not out.exists() and not list(out.parent.glob(".*"))


def test_damaged_shard_leaves_no_output(checkpoint, tmp_path):
    shard = next((checkpoint / "release").glob("*.distcp"))
    shard.write_bytes(b"")
    assert_refused(checkpoint, tmp_path / "out", "--load", "is not complete")


def test_assets_of_another_model(checkpoint, tmp_path):
    change_json(checkpoint / "hf_assets" / "config.json", {"num_hidden_layers": 3})
    assert_refused(checkpoint, tmp_path / "out", "--num-layers 4", "config.json has 3")


def test_unknown_and_missing_tensors(checkpoint, tmp_path):
    change_json(checkpoint / "hf_assets" / "config.json", {"tie_word_embeddings": True})
    folder = MegatronFolder(checkpoint, "--load")
    index = folder.metadata.state_dict_metadata
    index["decoder.layers.self_attention.q_layernorm.weight"] = index["decoder.final_layernorm.weight"]
    with pytest.raises(MkdCheckpointError, match=r"untie-embeddings"):
        export_hf(folder, tmp_path / "out")
    shutil.rmtree(checkpoint / "hf_assets")
    with pytest.raises(MkdCheckpointError, match=r"q_layernorm\.weight is not part of LlamaForCausalLM"):
        export_hf(folder, tmp_path / "out")
    del index["decoder.layers.self_attention.q_layernorm.weight"], index["decoder.layers.mlp.linear_fc2.weight"]
    with pytest.raises(MkdCheckpointError, match=r"decoder\.layers\.0\.mlp\.linear_fc2\.weight is missing"):
        export_hf(folder, tmp_path / "out")


def test_incomplete_folder_leaves_no_checkpoint(folders, tmp_path):
    broken = make_llama(tmp_path / "hf")
    change_weights(broken, {"model.norm.weight": None})
    done = convert("import", "--hf", broken, "--save", tmp_path / "megatron")
    assert done.status == 1
    assert done.errors.strip() == f"error: --hf {broken}: tensor model.norm.weight of shape [48] is missing"
    assert list(tmp_path.iterdir()) == [broken]


def test_outputs_are_not_overwritten(folders):
    original, checkpoint = folders["untied fp32 in shards"]
    with pytest.raises(MkdCheckpointError, match=f"--save {checkpoint} exists"):
        import_hf(HFFolder(original, "--hf"), checkpoint)
    done = convert("export", "--load", checkpoint, "--hf", original)
    assert (done.status, done.errors.strip()) == (
        1,
        f"error: --hf {original} exists and is not empty; give a new folder, or remove it",
    )


def test_verify_of_equal_and_different_models(folders, tmp_path):
    original, checkpoint = folders["untied fp32 in shards"]
    words = ("verify", "--load", checkpoint, "--rows", "2", "--length", "16")
    done = convert(*words, "--hf", original)
    assert done.status == 0, done.errors
    assert "32 tokens, fp32: max error of a logit" in done.output and "perplexity: " in done.output
    other = make_llama(tmp_path / "hf", rope_parameters={**LLAMA3_ROPE, "factor": 8.0}, rms_norm_eps=1e-2)
    done = convert(*words, "--hf", other)
    assert done.status == 1
    assert "differ by" in done.errors and "--tolerance 0.001" in done.errors
    change_weights(other, {"model.norm.weight": read_weights(other)["model.norm.weight"] * torch.nan})
    done = convert(*words, "--hf", other)
    assert done.status == 1
    assert "differ by nan" in done.errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "0"), "--rows is 0"),
        (("--text", "absent.txt"), "--text absent.txt does not exist"),
        (("--length", "97"), "--length 97 is longer than the 96 positions of --load "),
    ],
)
def test_verify_names_a_flag(folders, words, message):
    original, checkpoint = folders["untied fp32 in shards"]
    done = convert("verify", "--load", checkpoint, "--hf", original, *words)
    assert (done.status, message in done.errors) == (1, True), done.errors


def test_verify_of_infinite_weights_names_no_flag_of_a_training(tmp_path):
    original = make_llama(tmp_path / "hf", num_hidden_layers=1)
    change_weights(original, {"model.norm.weight": read_weights(original)["model.norm.weight"] * torch.inf})
    import_hf(HFFolder(original, "--hf"), tmp_path / "megatron")
    done = convert("verify", "--load", tmp_path / "megatron", "--hf", original, "--length", 8)
    assert (done.status, done.errors.rstrip().endswith("are not finite in float32: its training overflowed")) == (
        1,
        True,
    )
    assert "--kd-" not in done.errors


def test_verify_of_models_of_different_size(folders):
    original, checkpoint = folders["tied bf16"][0], folders["untied fp32 in shards"][1]
    done = convert("verify", "--load", checkpoint, "--hf", original)
    layers = HFFolder(folders["untied fp32 in shards"][0], "--hf").config["num_hidden_layers"]
    expected = f"--hf {original} and --load {checkpoint} are not the same model: layers: 2 and {layers}"
    assert (done.status, done.errors.strip()) == (1, f"error: {expected}")


def test_inspect(folders):
    original, checkpoint = folders["tied bf16"]
    for flag, folder in (("--hf", original), ("--load", checkpoint)):
        done = convert("inspect", flag, folder)
        assert done.status == 0, done.errors
        facts = dict(line.split(maxsplit=1) for line in done.output.splitlines() if line.split()[0] != "key-value")
        assert facts["architecture"] == "LlamaForCausalLM"
        assert (facts["layers"], facts["width"], facts["tokens"], facts["embeddings"]) == ("2", "48", "131", "tied")
        assert "bfloat16" in facts["weights"] and "float32" not in facts["weights"]


def test_architecture_by_name(folders, checkpoint, tmp_path):
    original, _ = folders["untied fp32 in shards"]
    stored = MegatronFolder(checkpoint, "--load")
    with pytest.raises(MkdCheckpointError, match=r"is of LlamaForCausalLM, not of MistralForCausalLM"):
        export_hf(stored, tmp_path / "out", architecture="MistralForCausalLM")
    shutil.rmtree(checkpoint / "hf_assets")
    with pytest.raises(MkdCheckpointError, match=r"known architectures: .*MistralForCausalLM"):
        export_hf(stored, tmp_path / "out", architecture="Mistral")
    with pytest.raises(MkdCheckpointError, match=r"Qwen3ForCausalLM has --qk-layernorm True"):
        export_hf(stored, tmp_path / "out", architecture="Qwen3ForCausalLM")
    export_hf(stored, tmp_path / "out", architecture="MistralForCausalLM")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert torch.equal(reference_logits(tmp_path / "out", TOKENS), reference_logits(original, TOKENS))


def test_model_card(checkpoint, tmp_path):
    (checkpoint / "release").rename(checkpoint / "iter_0000002")
    (checkpoint / TRACKER).write_text("2")
    loss = "(1 - R) CE + R KD, computed by eager; and so on"
    plan = {"teacher": "4 layers x 48", "student": "2 layers | 32", "loss": loss}
    (checkpoint / "kd_config.json").write_text(json.dumps({"kd": {}, "plan": plan}))
    lines = [{"iteration": 0, "valid_kd": 0.5}, {"iteration": 1, "loss": 3.0, "tokens": 1000}]
    lines += [{"iteration": 2, "loss": 2.5, "tokens": 2000}, {"iteration": 2, "valid_kd": 0.25}]
    lines += [{"iteration": 3, "loss": 2.0, "tokens": 4000}]  # after this checkpoint
    text = [json.dumps(line) + "\n" for line in lines]
    (checkpoint / "metrics.jsonl").write_text("".join(text) + '{"iteration": 4, "lo')  # a run that was killed
    export_hf(MegatronFolder(checkpoint, "--load"), tmp_path / "small-student")
    card = (tmp_path / "small-student" / "README.md").read_text()
    for words in ("| teacher | 4 layers x 48 |", "2 layers \\| 32", "| tokens | 3,000 |", "| `loss` | 2.5000 |"):
        assert words in card, card
    assert "# small-student\n" in card and "| loss | (1 - R) CE + R KD |" in card and "| iteration | 2 |" in card
    assert "| `valid_kd` | 0.2500 |" in card and "3.0000" not in card

    (checkpoint / "metrics.jsonl").write_text("".join(text[2:]))  # continued from a checkpoint of another folder
    card = model_card(MegatronFolder(checkpoint, "--load"))
    assert "# megatron\n" in card and "tokens" not in card and "| `loss` | 2.5000 |" in card


def test_a_changed_shard_is_not_exported(checkpoint, tmp_path):
    """Its bytes are compared with the hash that the save has recorded."""
    shard = next((checkpoint / "release").glob("*.distcp"))
    hashes = {path.name: file_hash(path) for path in (checkpoint / "release").iterdir()}
    (checkpoint / "release" / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes}))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(MkdCheckpointError, match=rf"is damaged: {shard.name} is not what was written"):
        export_hf(MegatronFolder(checkpoint, "--load"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
