"""tools/prune.py width."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.layouts import Dims
from mkd.checkpoint.prune.depth import PrunableTeacher
from mkd.checkpoint.prune.importance import activation_importance, magnitude_importance, read_samples
from mkd.checkpoint.prune.width import Importance, WidthChoice
from mkd.cli import prune
from mkd.errors import MkdCheckpointError
from tests.support.chats import MARKED, chat_tokenizer, talk, write_lines
from tests.support.e2e.small_job import VOCAB
from tests.support.hf_folders import change_json, change_weights, make_model, read_weights, reference_logits
from tests.support.hf_models import NEAR_MODELS
from tests.support.tolerance import FP32, assert_close_norm

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM = 2, 48, 72, 6, 2, 16
SMALL = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3")
SIZES = ["--hidden-size", "30", "--ffn-hidden-size", "40"]


def make_teacher(folder, model_type="llama", **sizes):
    make_model(folder, model_type, **{**SMALL, **sizes})
    chat_tokenizer(folder, MARKED)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("width") / "teacher")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    records = [{"text": "Norms of channels."}, {"messages": talk("What?", "A head.")}, {"text": "Rows and columns."}]
    return write_lines(tmp_path_factory.mktemp("data") / "samples.jsonl", records)


def run(teacher, student, *flags):
    return prune.main(["width", "--hf", str(teacher), "--out", str(student), *map(str, flags)])


def silence(folder, hidden, ffn, heads, groups):
    """Set all weights of these channels and heads to zero; `ffn`, `heads` and `groups` have one entry per layer.

    Uses tensor names and transformers' order of rows, not the tables under test.
    """
    weights = read_weights(folder)
    for name, weight in weights.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        part = name.split(".")[-2]
        if part in ("o_proj", "down_proj"):
            weight[hidden] = 0
        elif weight.dim() == 2:
            weight[:, hidden] = 0
        if layer is None:
            continue
        queries, keys = rows_of_heads(heads[layer]), rows_of_heads(groups[layer])
        first_key, first_value = HEADS * HEAD_DIM, (HEADS + GROUPS) * HEAD_DIM
        if part == "qkv_proj":
            weight[torch.cat([queries, first_key + keys, first_value + keys])] = 0
        elif part in ("q_proj", "k_proj", "v_proj"):
            weight[queries if part == "q_proj" else keys] = 0
        elif part == "o_proj":
            weight[:, queries] = 0
        elif part in ("gate_proj", "up_proj"):
            weight[ffn[layer]] = 0
        elif part == "gate_up_proj":
            weight[torch.cat([ffn[layer], FFN + ffn[layer]])] = 0
        elif part == "down_proj":
            weight[:, ffn[layer]] = 0
    change_weights(folder, weights)


def rows_of_heads(heads):
    return (torch.tensor(heads, dtype=torch.int64)[:, None] * HEAD_DIM + torch.arange(HEAD_DIM)).flatten()


def rescale_norms(folder, old, new):
    """Compensate the norms: with the same sum of squares over fewer channels, they divide by a larger number."""
    weights = read_weights(folder)
    scaled = {n: w * math.sqrt(old / new) for n, w in weights.items() if "norm" in n and w.shape == (new,)}
    assert len(scaled) == 2 * LAYERS + 1
    change_weights(folder, scaled)
    change_json(folder / "config.json", {"rms_norm_eps": 1e-5 * old / new})


@pytest.mark.parametrize("model_type", DENSE)
@pytest.mark.parametrize("importance", ["magnitude", "activation"])
def test_zero_channels_and_heads_are_removed_first(tmp_path, data, model_type, importance):
    """The student without them computes the teacher's logits."""
    teacher, student = make_teacher(tmp_path / "teacher", model_type), tmp_path / "student"
    generator = torch.Generator().manual_seed(3)
    hidden, *ffn = (torch.randperm(n, generator=generator)[:k] for n, k in ((HIDDEN, 18), (FFN, 32), (FFN, 32)))
    # One group per layer, with its three heads. A head without a query has a nonzero output, so it is the least
    # important head of its group by magnitude only.
    groups, heads = [[0], [1]], [[0, 1, 2], [3, 4, 5]]
    if importance == "magnitude":
        heads = [[0, 1, 2, 4], [0, 3, 4, 5]]
    silence(teacher, hidden, ffn, heads, groups)
    flags = ["--importance", importance, *(["--data", data] if importance == "activation" else [])]
    kept = HEADS - len(heads[0])
    assert run(teacher, student, *flags, *SIZES, "--num-attention-heads", kept, "--num-query-groups", 1) == 0
    family, args = read_architecture(HFFolder(student, "--hf"))
    check_tensors(HFFolder(student, "--hf"), family)
    dims = family.dims(args)
    assert (dims.hidden, dims.ffn, dims.heads, dims.groups, dims.head_dim) == (30, 40, kept, 1, HEAD_DIM)
    rescale_norms(student, HIDDEN, 30)
    assert_close_norm(reference_logits(student, TOKENS), reference_logits(teacher, TOKENS), FP32, model_type)


@pytest.mark.parametrize("model_type", DENSE)
def test_same_size(tmp_path, model_type):
    teacher, student = make_teacher(tmp_path / "teacher", model_type, tie_word_embeddings=True), tmp_path / "student"
    (teacher / "generation_config.json").write_text('{"temperature": 0.5}')
    assert run(teacher, student, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS) == 0
    old, new = read_weights(teacher), read_weights(student)
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    assert json.loads((student / "config.json").read_text()) == json.loads((teacher / "config.json").read_text())
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (student / name).read_bytes() == (teacher / name).read_bytes()


def test_with_layers(tmp_path):
    """Layers and widths in one call; the head width is written even if the teacher's config.json only implies it."""
    teacher = make_teacher(tmp_path / "teacher", "qwen2", num_hidden_layers=3, head_dim=HIDDEN // HEADS)
    change_json(teacher / "config.json", {"head_dim": None})
    assert run(teacher, tmp_path / "student", "--hidden-size", 30, "--layers", "0,2") == 0
    config = json.loads((tmp_path / "student/config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (2, 30, 8)
    assert len(config["layer_types"]) == 2
    old, new = read_weights(teacher), read_weights(tmp_path / "student")
    kept = magnitude_importance(*model_of(teacher)).hidden.topk(30).indices.sort().values
    assert torch.equal(new["model.layers.1.mlp.up_proj.weight"], old["model.layers.2.mlp.up_proj.weight"][:, kept])
    assert reference_logits(tmp_path / "student", TOKENS).isfinite().all()


def test_granite_4(tmp_path):
    """The width of its MLPs has a key of its own, and transformers checks widths of Mamba layers that are not there."""
    sizes = {name: value for name, value in NEAR_MODELS["granite 4, dense"].items() if name not in SMALL}
    teacher = make_teacher(tmp_path / "teacher", **sizes)
    assert run(teacher, tmp_path / "student", *SIZES) == 0
    config = json.loads((tmp_path / "student/config.json").read_text())
    assert (config["hidden_size"], config["shared_intermediate_size"]) == (30, 40)
    assert reference_logits(tmp_path / "student", TOKENS).isfinite().all()


def model_of(folder):
    teacher = PrunableTeacher(folder)
    return teacher.folder, teacher.family, teacher.args


def test_activations_by_hand(tmp_path):
    """With one token per sample, attention returns the values unchanged."""
    folder = make_teacher(tmp_path / "teacher", num_hidden_layers=1)
    ids = [3, 14, 15]
    seen = activation_importance(*model_of(folder), [torch.tensor([i]) for i in ids])
    model = AutoModelForCausalLM.from_pretrained(folder).double().model
    layer = model.layers[0]
    with torch.no_grad():
        inputs = model.embed_tokens(torch.tensor(ids))
        normed = layer.input_layernorm(inputs)
        values = layer.self_attn.v_proj(normed).view(-1, GROUPS, HEAD_DIM).repeat_interleave(HEADS // GROUPS, 1)
        middle = inputs + layer.self_attn.o_proj(values.flatten(1))
        normed_middle = layer.post_attention_layernorm(middle)
        inner = torch.nn.functional.silu(layer.mlp.gate_proj(normed_middle)) * layer.mlp.up_proj(normed_middle)
        last = model.norm(middle + layer.mlp.down_proj(inner))
    assert_close_norm(seen.hidden, sum(x.abs().mean(0) for x in (normed, normed_middle, last)), FP32, "hidden")
    assert_close_norm(seen.ffn[0], inner.abs().mean(0), FP32, "ffn")
    assert_close_norm(seen.heads[0], values.norm(dim=-1).mean(0), FP32, "heads")


def test_importance_is_a_mean_over_tokens(teacher):
    model, samples = model_of(teacher), [torch.arange(5), torch.arange(7, 18)]
    both, first, second = (activation_importance(*model, chosen) for chosen in (samples, samples[:1], samples[1:]))
    for name in ("hidden", "ffn", "heads"):
        expected = (5 * getattr(first, name) + 11 * getattr(second, name)) / 16
        assert_close_norm(getattr(both, name), expected, FP32, name)


def test_magnitudes_by_hand(teacher, monkeypatch):
    """Scores of one layer, with matrices read a few rows at a time."""
    monkeypatch.setattr("mkd.checkpoint.hf.folder.ROWS_PER_BLOCK", 7)
    seen = magnitude_importance(*model_of(teacher))
    weights = {name: weight.double().abs() for name, weight in read_weights(teacher).items()}
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    writers = ("o_proj.weight", "down_proj.weight")
    hidden = sum(weight.mean(1 if name.endswith(writers) else 0) for name, weight in matrices.items())
    assert_close_norm(seen.hidden, hidden, FP32, "hidden")
    mlp = {name: weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")}
    assert_close_norm(seen.ffn[1], mlp["gate"].mean(1) + mlp["up"].mean(1) + mlp["down"].mean(0), FP32, "ffn")
    q, k, v, o = (weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkvo")
    own = torch.stack([block.mean() for block in q.split(HEAD_DIM)]) + torch.stack(
        [block.mean() for block in o.split(HEAD_DIM, 1)]
    )
    shared = [a.mean() + b.mean() for a, b in zip(k.split(HEAD_DIM), v.split(HEAD_DIM), strict=True)]
    assert_close_norm(seen.heads[1], own + torch.stack(shared).repeat_interleave(3), FP32, "heads")


def test_activations_ignore_large_weights_without_effect(tmp_path, data):
    """A channel with a zero gate has no effect, even if its other weights are large."""
    folder = make_teacher(tmp_path / "teacher")
    weights = read_weights(folder)
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.mlp.gate_proj.weight"][:3] = 0
        weights[f"model.layers.{layer}.mlp.up_proj.weight"][:3] *= 100
    change_weights(folder, weights)
    for importance, flags in {"magnitude": [], "activation": ["--data", data]}.items():
        assert run(folder, tmp_path / importance, "--ffn-hidden-size", FFN - 3, "--importance", importance, *flags) == 0
        up = read_weights(tmp_path / importance)["model.layers.1.mlp.up_proj.weight"]
        assert torch.equal(up, weights["model.layers.1.mlp.up_proj.weight"][3:]) == (importance == "activation")


def test_heads_are_selected_per_group():
    old, new = (Dims(hidden=2, ffn=2, heads=h, groups=g, head_dim=2, vocab=1) for h, g in ((6, 3), (2, 2)))
    heads = torch.tensor([[1.0, 5.0, 4.0, 4.5, 6.0, 0.0], [3.0, 3.0, 1.0, 0.0, 2.0, 2.5]], dtype=torch.float64)
    two = torch.zeros(2, dtype=torch.float64)
    choice = WidthChoice.best(Importance(two, torch.stack([two, two]), heads), old, new)
    assert choice.groups.tolist() == [[0, 2], [0, 2]]
    assert choice.heads.tolist() == [[1, 4], [0, 5]]
    assert choice.kept("query", 1).tolist() == [0, 1, 10, 11]
    assert choice.kept("query_key_value", 0).tolist() == [2, 3, 8, 9, *(12 + n for n in (0, 1, 4, 5, 6, 7, 10, 11))]
    assert choice.kept("hidden", 0) is choice.kept("vocab", None) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["no size", "--hidden-size", "--num-query-groups"]),
        (["--hidden-size", "49"], ["--hidden-size", "49", "48"]),
        (["--hidden-size", "0"], ["--hidden-size", "0"]),
        (["--ffn-hidden-size", "73"], ["--ffn-hidden-size", "73", "72"]),
        (["--num-attention-heads", "8"], ["--num-attention-heads", "8", "6"]),
        (["--num-attention-heads", "3"], ["--num-attention-heads", "3", "2 query groups"]),
        (["--num-attention-heads", "4", "--num-query-groups", "3"], ["--num-query-groups", "3", "2"]),
        (["--num-attention-heads", "4", "--num-query-groups", "1"], ["--num-attention-heads 4", "4 heads per group"]),
        (["--num-query-groups", "1"], ["--num-query-groups", "--num-attention-heads"]),
        (["--hidden-size", "32"], ["transformers", "32", "multiple", "(6)", "--hidden-size 30 or 36"]),
        ([*SIZES, "--layers", "0,7"], ["--layers", "0,7"]),
        ([*SIZES, "--importance", "activation"], ["--data"]),
        ([*SIZES, "--data", "{data}"], ["--data", "--importance"]),
        ([*SIZES, "--samples", "3"], ["--samples", "--importance"]),
        ([*SIZES, "--importance", "activation", "--data", "{data}", "--samples", "0"], ["--samples", "0"]),
        ([*SIZES, "--importance", "activation", "--data", "{data}", "--seq-length", "0"], ["--seq-length", "0"]),
        ([*SIZES, "--importance", "activation", "--data", "{data}", "--device", "abacus"], ["--device", "abacus"]),
        ([*SIZES, "--importance", "activation", "--data", "nowhere.jsonl"], ["--data", "nowhere.jsonl"]),
    ],
    ids=" ".join,
)
def test_wrong_flags(teacher, data, tmp_path, capsys, flags, words):
    assert run(teacher, tmp_path / "student", *(flag.format(data=data) for flag in flags)) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and all(word in message for word in words), message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["no text"]),
        ('{"text": ""}', ["no text"]),
        ("{", ["line 1", "JSON"]),
        ('{"text": 3}', ["line 1", "int"]),
        ('{"body": "a"}', ["line 1", "body"]),
        ('{"messages": [{"role": "poet", "content": "a"}]}', ["line 1", "poet"]),
    ],
)
def test_wrong_data(teacher, tmp_path, capsys, line, words):
    (tmp_path / "samples.jsonl").write_text(line + "\n")
    flags = ["--importance", "activation", "--data", tmp_path / "samples.jsonl"]
    assert run(teacher, tmp_path / "student", *SIZES, *flags) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_wrong_teachers(tmp_path, data, capsys):
    def fails(folder, *words):
        capsys.readouterr()
        assert run(folder, tmp_path / "student", *SIZES, "--importance", "activation", "--data", data) == 1
        message = capsys.readouterr().err
        assert message.startswith("error: ") and all(word in message for word in words), message
        assert not (tmp_path / "student").exists()

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    fails(
        make_model(tmp_path / "mixture", "qwen3_moe", **SMALL, **experts), "Qwen3MoeForCausalLM", "mixture of experts"
    )
    fails(make_model(tmp_path / "hybrid", "qwen3_5_text", **SMALL), "Qwen3_5ForCausalLM", "gated delta nets")
    mixers = {"layers_block_type": ["mamba", "mlp"]}
    fails(make_model(tmp_path / "mixers", "nemotron_h", **SMALL, **mixers), "NemotronHForCausalLM", "only pruned in")
    folder = make_model(tmp_path / "teacher", "llama", **{**SMALL, "vocab_size": 64})
    fails(folder, str(folder), "no tokenizer")
    chat_tokenizer(folder, None)
    fails(folder, "line 1", "vocab_size is 64")
    change_json(folder / "config.json", {"architectures": ["NoSuchModel"]})
    fails(folder, "NoSuchModel", "LlamaForCausalLM")


@pytest.mark.parametrize("importance", ["weights", "activations"])
def test_not_finite(tmp_path, importance):
    folder = make_teacher(tmp_path / "teacher")
    change_weights(folder, {"model.layers.1.mlp.up_proj.weight": torch.full((FFN, HIDDEN), torch.nan)})
    with pytest.raises(MkdCheckpointError, match=f"{importance} that are not finite"):
        if importance == "weights":
            magnitude_importance(*model_of(folder))
        else:
            activation_importance(*model_of(folder), [torch.arange(4)])


def test_nothing_is_left_after_an_error(teacher, tmp_path, monkeypatch, capsys):
    read = HFFolder.read

    def failing_read(self, name, *where):
        if name == "lm_head.weight" and not where:
            raise OSError("the disk is gone")
        return read(self, name, *where)

    monkeypatch.setattr(HFFolder, "read", failing_read)
    assert run(teacher, tmp_path / "student", *SIZES) == 1
    assert "the disk is gone" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    (tmp_path / "student").mkdir()
    (tmp_path / "student/mine").touch()
    assert run(teacher, tmp_path / "student", *SIZES) == 1
    assert "--out" in capsys.readouterr().err


def test_samples(teacher, tmp_path):
    file = write_lines(tmp_path / "s.jsonl", [{"text": "abc"}, {"messages": talk("a", "b")}, {"text": "d"}])
    file.write_text("\n" + file.read_text())
    folder = HFFolder(teacher, "--hf")
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", MARKED)
    texts = ["abc", tokenizer.apply_chat_template(talk("a", "b"), tokenize=False)]
    assert [s.tolist() for s in read_samples(folder, file, 2, 100)] == [tokenizer(text).input_ids for text in texts]
    assert [len(s) for s in read_samples(folder, file, 9, 2)] == [2, 2, 1]
