"""Reading Hugging Face folders: complete and damaged ones."""

import json
import os
import shutil
import time

import pytest
import torch

from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.folder import INDEX, WEIGHTS, HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.source import ModelSource
from mkd.errors import MkdCheckpointError
from tests.support.hf_folders import add_tokenizer, change_json, change_weights, make_llama, make_model, read_weights
from tests.support.hf_models import HYBRID_MODELS

FLAG = "--kd-teacher-hf"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    return {
        "single": make_llama(root / "single"),
        "sharded": make_llama(root / "sharded", shard_size="60KB"),
        "tied": make_llama(root / "tied", tie_word_embeddings=True),
    }


@pytest.fixture
def folder(originals, tmp_path):
    """`folder(kind)`: a copy to damage."""
    return lambda kind: shutil.copytree(originals[kind], tmp_path / kind)


def load(path):
    opened = HFFolder(path, FLAG)
    family, _ = read_architecture(opened)
    check_tensors(opened, family)
    return opened


def assert_refused(path, *words):
    with pytest.raises(MkdCheckpointError) as caught:
        load(path)
    for word in (FLAG, str(path), *words):
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_tensors_and_blocks(originals, kind):
    opened = load(originals[kind])
    weights = read_weights(originals[kind])
    assert len(list(originals[kind].glob("*.safetensors"))) == (1 if kind == "single" else 9)
    assert opened.tensors == {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    for name, whole in weights.items():
        assert torch.equal(opened.read(name), whole), name
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(opened.read(name, slice(3, 7)), weights[name][3:7])
    assert torch.equal(opened.read(name, None, slice(5, 12)), weights[name][:, 5:12])
    assert torch.equal(opened.read(name, slice(48, 48), slice(1, 3)), weights[name][48:48, 1:3])
    with pytest.raises(MkdCheckpointError, match="no tensor nothing"):
        opened.read("nothing")


def test_missing_folder(tmp_path):
    assert_refused(tmp_path / "absent", "does not exist")


def test_file_instead_of_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path / "file", "give the folder")


def test_empty_folder(tmp_path):
    assert_refused(tmp_path, "empty")


@pytest.mark.parametrize(
    ("kind", "name", "word"), [("single", "config.json", "config.json"), ("single", WEIGHTS, INDEX)]
)
def test_missing_file(folder, kind, name, word):
    path = folder(kind)
    (path / name).unlink()
    assert_refused(path, word)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_config_is_not_an_object(folder, text):
    path = folder("single")
    (path / "config.json").write_text(text)
    assert_refused(path, "config.json")


@pytest.mark.parametrize("keep", [4, 100, -1, -4000])
def test_truncated_weights(folder, keep):
    path = folder("single")
    whole = (path / WEIGHTS).read_bytes()
    kept = keep if keep > 0 else len(whole) + keep
    (path / WEIGHTS).write_bytes(whole[:kept])
    assert_refused(path, WEIGHTS, f"{kept} ", *([str(len(whole)), "truncated"] if keep < 0 else []))


def test_trailing_bytes(folder):
    path = folder("single")
    with (path / WEIGHTS).open("ab") as file:
        file.write(b"x")
    assert_refused(path, WEIGHTS, "too long")


def rewrite_header(path, change):
    """Apply `change` to the parsed header of the weights file, keeping the tensor bytes."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def shift_offsets(header):
    header["model.norm.weight"]["data_offsets"] = [n + 4 for n in header["model.norm.weight"]["data_offsets"]]


CHANGES = {
    "offsets": shift_offsets,
    "shape": lambda header: header["model.norm.weight"].update(shape=[47]),
    "dtype": lambda header: header["model.norm.weight"].update(dtype="F31"),
    "no offsets": lambda header: header["model.norm.weight"].pop("data_offsets"),
    "overflow": lambda header: header["model.norm.weight"].update(shape=[2**62, 4], data_offsets=[0, 0]),
    "beyond 64 bits": lambda header: header["model.norm.weight"].update(shape=[2**64]),
    "fractions": lambda header: header["model.norm.weight"].update(shape=[48.5]),
    "negative": lambda header: header["model.norm.weight"].update(shape=[-48, -1]),
    "texts": lambda header: header["model.norm.weight"].update(data_offsets=["0", "4"]),
    "no object": lambda header: header.update({"model.norm.weight": 3}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_header(folder, change):
    path = folder("single")
    rewrite_header(path / WEIGHTS, CHANGES[change])
    assert_refused(path, WEIGHTS, "damaged safetensors header")


def test_header_is_not_json(folder):
    path = folder("single")
    raw = bytearray((path / WEIGHTS).read_bytes())
    raw[8:12] = b"}}}}"
    (path / WEIGHTS).write_bytes(raw)
    assert_refused(path, WEIGHTS, "damaged safetensors header")


def test_weights_that_git_lfs_has_not_fetched(folder):
    path = folder("single")
    (path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 7\n")
    assert_refused(path, WEIGHTS, "is a pointer of Git LFS, not the file itself: run git lfs pull")


def test_missing_shard(folder):
    path = folder("sharded")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert_refused(path, INDEX, shard.name, "missing")


@pytest.mark.parametrize(
    "target", ["../other.safetensors", "/etc/passwd", "a/../../x", "..", "", "sub/x.safetensors", 3]
)
def test_index_with_a_path_outside_the_folder(folder, target):
    path = folder("sharded")
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    change_json(path / INDEX, {"weight_map": weight_map | {"model.norm.weight": target}})
    assert_refused(path, INDEX, "model.norm.weight", repr(target))


def test_index_names_another_file(folder):
    path = folder("sharded")
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map["model.norm.weight"])
    change_json(path / INDEX, {"weight_map": weight_map | {"model.norm.weight": other}})
    assert_refused(path, INDEX, "model.norm.weight", other)


def test_index_without_map(folder):
    path = folder("sharded")
    change_json(path / INDEX, {"weight_map": None})
    assert_refused(path, INDEX, "weight_map")


def test_tensor_in_two_files(folder):
    path = folder("sharded")
    first, second = sorted(path.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    weight_map = {n: f for n, f in json.loads((path / INDEX).read_text())["weight_map"].items() if f != second.name}
    names = [name for name, file in weight_map.items() if file == first.name]
    change_json(path / INDEX, {"weight_map": weight_map | {names[0]: second.name, names[1]: first.name}})
    assert_refused(path, "both in", first.name, second.name)


def test_missing_tensor(folder):
    path = folder("single")
    change_weights(path, {"model.layers.3.mlp.up_proj.weight": None})
    assert_refused(path, "model.layers.3.mlp.up_proj.weight", "[72, 48]", "missing")


def test_missing_lm_head(folder):
    path = folder("single")
    change_weights(path, {"lm_head.weight": None})
    assert_refused(path, "lm_head.weight", "missing")


@pytest.mark.parametrize("name", ["model.layers.4.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_extra_tensor(folder, name):
    path = folder("single")
    change_weights(path, {name: torch.ones(48)})
    assert_refused(path, name, "LlamaForCausalLM")


def test_old_rotary_buffers_are_ignored(folder):
    path = folder("single")
    change_weights(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.k_proj.weight", (96, 48)),
        ("model.embed_tokens.weight", (132, 48)),
        ("model.norm.weight", (48, 1)),
    ],
)
def test_wrong_shape(folder, name, shape):
    path = folder("single")
    change_weights(path, {name: torch.ones(shape)})
    assert_refused(path, name, str(list(shape)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensor(folder, dtype):
    path = folder("single")
    change_weights(path, {"model.norm.weight": torch.ones(48).to(dtype)})
    assert_refused(path, "model.norm.weight", str(dtype))


def test_stored_tied_lm_head_must_be_equal(folder, monkeypatch):
    path = folder("tied")
    embedding = read_weights(path)["model.embed_tokens.weight"]
    change_weights(path, {"lm_head.weight": embedding.clone()})
    load(path)
    whole, read = HFFolder(path, FLAG), []
    monkeypatch.setattr(whole, "read", lambda *name: read.append(name) or HFFolder.read(whole, *name))
    for _ in range(2):  # a job checks the folder when it starts, and when it loads the weights
        check_tensors(whole, read_architecture(whole)[0])
    assert len(read) == 2
    change_weights(path, {"lm_head.weight": embedding + 1})
    assert_refused(path, "lm_head.weight", "tie_word_embeddings")


def test_missing_config_key_names_the_folder(folder):
    path = folder("single")
    change_json(path / "config.json", {"rms_norm_eps": None})
    assert_refused(path, "rms_norm_eps")


def test_fingerprint_depends_on_the_model_only(originals, folder):
    expected = HFFolder(originals["single"], FLAG).fingerprint()
    assert len(expected) == 32
    assert HFFolder(originals["sharded"], FLAG).fingerprint() == expected
    path = folder("single")
    change_json(path / "config.json", {"transformers_version": "1", "use_cache": False})
    assert HFFolder(path, FLAG).fingerprint() == expected
    change_json(path / "config.json", {"rms_norm_eps": 1e-4})
    assert HFFolder(path, FLAG).fingerprint() != expected


def test_fingerprint_ignores_rope_keys_that_repeat_others(folder):
    path = folder("single")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    change_json(path / "config.json", {"rope_parameters": rope, "rope_theta": None, "rope_scaling": None})
    own = HFFolder(path, FLAG).fingerprint()
    repeated = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    change_json(path / "config.json", repeated)
    assert HFFolder(path, FLAG).fingerprint() == own
    change_json(path / "config.json", {"rope_theta": 1e4})
    assert HFFolder(path, FLAG).fingerprint() != own


def test_fingerprint_depends_on_weights(originals, folder):
    path = folder("single")
    name = "model.layers.1.input_layernorm.weight"
    change_weights(path, {name: read_weights(path)[name] + 1e-3})
    assert HFFolder(path, FLAG).fingerprint() != HFFolder(originals["single"], FLAG).fingerprint()


def test_tokenizer_hash(folder):
    path = folder("single")
    assert HFFolder(path, FLAG).tokenizer_hash() is None
    add_tokenizer(path, ["a", "b"])
    first = HFFolder(path, FLAG).tokenizer_hash()
    (path / "chat_template.jinja").write_text("{{ messages }}")
    change_json(path / "tokenizer.json", {"padding": {"strategy": "BatchLongest"}})
    assert HFFolder(path, FLAG).tokenizer_hash() == first
    add_tokenizer(path, ["b", "a"])
    swapped = HFFolder(path, FLAG).tokenizer_hash()
    change_json(path / "tokenizer.json", {"added_tokens": [{"id": 2, "content": "<s>"}]})
    assert len({first, swapped, HFFolder(path, FLAG).tokenizer_hash()}) == 3


def test_merges_in_both_formats_are_equal(folder):
    path = folder("single")
    hashes = set()
    for merges in (["a b", "ab c"], [["a", "b"], ["ab", "c"]]):
        content = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": merges}}
        (path / "tokenizer.json").write_text(json.dumps(content))
        hashes.add(HFFolder(path, FLAG).tokenizer_hash())
    assert len(hashes) == 1


def test_assets_exclude_weights(folder):
    path = folder("single")
    add_tokenizer(path, ["a"])
    names = [asset.name for asset in HFFolder(path, FLAG).assets()]
    assert names == ["config.json", "generation_config.json", "tokenizer.json"]


@pytest.mark.parametrize("size", [10**4, 10**6, 10**18, 10**400])
def test_layers_beyond_any_model(folder, size):
    """Before anything with an entry per layer is made."""
    path, begin = folder("single"), time.monotonic()
    change_json(path / "config.json", {"num_hidden_layers": size})
    assert_refused(path, "is missing" if size == 10**4 else "at most 10000 is supported")
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"])
def test_sizes_beyond_an_int(folder, key):
    path = folder("single")
    change_json(path / "config.json", {key: 10**18})
    rule = "at most 2147483647 is supported (read as LlamaForCausalLM)"
    assert_refused(path, f'"{key}" is 1000000000000000000; {rule}')


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_pipes_are_not_waited_for(folder, name):
    path = folder("sharded")
    (path / name).unlink()
    os.mkfifo(path / name)
    assert_refused(path, f"{name} is not readable JSON (it is not a regular file)")


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 200 + "1" + "}" * 200, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_json_bombs(folder, text):
    path = folder("single")
    (path / "config.json").write_text(text)
    assert_refused(path, "config.json is not readable JSON")


def test_prediction_heads_are_left_out(tmp_path, capsys):
    folder = make_model(tmp_path / "qwen", **HYBRID_MODELS["qwen3.5"])
    change_weights(folder, {"mtp.fc.weight": torch.zeros(48, 96), "mtp.norm.weight": torch.zeros(48)})
    ModelSource.from_hf(str(folder), "--kd-teacher-hf")
    assert "2 tensors mtp.* (heads for multi-token prediction) are left out" in capsys.readouterr().out
    llama = make_llama(tmp_path / "llama")
    change_weights(llama, {"mtp.fc.weight": torch.zeros(48, 96)})
    with pytest.raises(MkdCheckpointError, match=r"tensor mtp.fc.weight is not part of LlamaForCausalLM"):
        ModelSource.from_hf(str(llama), "--kd-teacher-hf")


def test_export_copies_prediction_heads(tmp_path):
    heads = {"mtp.fc.weight": torch.randn(48, 96), "mtp.layers.0.mlp.up_proj.weight": torch.randn(72, 48)}
    folder = make_model(tmp_path / "qwen", **HYBRID_MODELS["qwen3.5"])
    change_weights(folder, heads)
    import_hf(HFFolder(folder, "--hf"), tmp_path / "megatron")
    stored = MegatronFolder(tmp_path / "megatron", "--load")
    export_hf(stored, tmp_path / "without")
    assert read_weights(folder).keys() - read_weights(tmp_path / "without").keys() == heads.keys()
    export_hf(stored, tmp_path / "with", mtp=str(folder))
    before, after = read_weights(folder), read_weights(tmp_path / "with")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    narrow = make_model(tmp_path / "narrow", **HYBRID_MODELS["qwen3.5"] | {"hidden_size": 60})
    for other, words in (
        (tmp_path / "without", "there are no heads for multi-token prediction"),
        (narrow, "--hidden-size of its model is 60, that of the checkpoint 48"),
        (make_llama(tmp_path / "llama"), "it is a LlamaForCausalLM, the checkpoint a Qwen3_5ForCausalLM"),
    ):
        with pytest.raises(MkdCheckpointError, match=f"--mtp .*{words}"):
            export_hf(stored, tmp_path / "refused", mtp=str(other))
    assert not (tmp_path / "refused").exists()
