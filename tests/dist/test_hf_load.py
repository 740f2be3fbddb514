"""Loading Hugging Face folders into every parallel layout reproduces the logits of transformers."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.checkpoint.staged_reads import Staging
from mkd.errors import MkdCheckpointError
from tests.support.dist.gpt_models import build_chunks, layout, run_stages
from tests.support.hf_folders import (
    LLAMA3_ROPE,
    CountingFolder,
    change_weights,
    make_llama,
    read_weights,
    reference_logits,
)
from tests.support.tolerance import LOGITS

FLAG = "--kd-student-hf"
MODELS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope, in shards": {"rope_parameters": LLAMA3_ROPE, "shard_size": "60KB"},
    "one key-value head": {"num_key_value_heads": 1},
    "all key-value heads": {"num_key_value_heads": 6},
}
TOKENS = torch.randint(0, 131, (2, 96), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make_llama(tmp_path_factory.mktemp("hf") / "model", **sizes) for name, sizes in MODELS.items()}


def loaded_logits(rank, world_size, path, tp, pp, vp):
    folder = HFFolder(path, FLAG)
    with layout(tp, pp, vp):
        chunks = build_chunks(read_architecture(folder)[1], vp)
        for chunk in chunks:
            for param in chunk.parameters():
                nn.init.constant_(param, float("nan"))
        load_hf_weights(chunks, folder)
        return run_stages(chunks, TOKENS)


def weights_by_way(rank, world_size, path):
    """Parameters that are read one after the other, and through staging buffers by several threads."""
    folder, loaded = HFFolder(path, FLAG), []
    with layout(world_size, 1, 1), pytest.MonkeyPatch.context() as patch:
        for staging in (None, Staging(torch.device("cpu"), nbytes=1000)):
            patch.setattr(Staging, "to", lambda device, staging=staging: staging)
            chunks = build_chunks(read_architecture(folder)[1], 1)
            for param in chunks[0].parameters():
                nn.init.constant_(param, float("nan"))
            load_hf_weights(chunks, folder)
            loaded.append({name: param.detach().clone() for name, param in chunks[0].named_parameters()})
    return loaded


@pytest.mark.parametrize("model", MODELS)
def test_staged_reads(gloo_pool, folders, model):
    for plain, staged in gloo_pool(2).run(weights_by_way, folders[model]):
        assert plain.keys() == staged.keys()
        for name, value in plain.items():
            assert torch.equal(staged[name], value), name


@pytest.mark.parametrize(("tp", "pp", "vp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers(gloo_pool, folders, model, tp, pp, vp):
    expected = reference_logits(folders[model], TOKENS)
    seen = [x for x in gloo_pool(tp * pp).run(loaded_logits, folders[model], tp, pp, vp) if x is not None]
    assert len(seen) == tp
    for logits in seen:
        assert (logits[..., :131] - expected).abs().max() <= LOGITS
        assert logits[..., 131:].count_nonzero() == 0


def test_logits_depend_on_rope_scaling(folders):
    """Shows that the test above detects a wrong factor."""
    path = folders["llama3 rope, in shards"]
    config = HFFolder(path, FLAG).config
    model = LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")
    config = {**config, "rope_parameters": {**LLAMA3_ROPE, "factor": 8.0}}
    other = LlamaForCausalLM._from_config(LlamaConfig(**config), attn_implementation="eager")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (other(TOKENS).logits - model(TOKENS).logits).abs().max() > 100 * LOGITS


def cast_parameters(rank, world_size, path):
    folder = HFFolder(path, FLAG)
    with layout(1, 1):
        chunks = [chunk.bfloat16() for chunk in build_chunks(read_architecture(folder)[1])]
        load_hf_weights(chunks, folder)
        return {name: param.detach().clone() for name, param in chunks[0].named_parameters()}


def test_weights_are_cast_to_the_parameters_dtype(gloo_pool, folders):
    (params,) = gloo_pool(1).run(cast_parameters, folders["untied"])
    weights = read_weights(folders["untied"])
    assert {param.dtype for param in params.values()} == {torch.bfloat16}
    norm, head = params["decoder.layers.1.pre_mlp_layernorm.weight"], params["output_layer.weight"]
    assert torch.equal(norm, weights["model.layers.1.post_attention_layernorm.weight"].bfloat16())
    assert torch.equal(head[:131], weights["lm_head.weight"].bfloat16())


def overflow(rank, world_size, path, dtype):
    folder = HFFolder(path, FLAG)
    with layout(1, 1):
        chunks = [chunk.to(dtype) for chunk in build_chunks(read_architecture(folder)[1])]
        try:
            load_hf_weights(chunks, folder)
        except MkdCheckpointError as error:
            return str(error)
        return {name: param.detach().clone() for name, param in chunks[0].named_parameters()}


def test_weights_beyond_fp16_are_refused(gloo_pool, tmp_path):
    path = make_llama(tmp_path / "model")
    head = read_weights(path)["lm_head.weight"].clone()
    head[3, :2], head[4, 0], head[5, 5] = 1e5, -7e4, 65510.0  # the last one is rounded to fp16's largest number
    change_weights(path, {"lm_head.weight": head})
    (message,) = gloo_pool(1).run(overflow, path, torch.float16)
    assert message.startswith(f"{FLAG} {path}: 3 of the 12288 values of tensor output_layer.weight are beyond")
    assert "float16 (largest 1e+05, limit 6.55e+04)" in message and "--bf16" in message
    (params,) = gloo_pool(1).run(overflow, path, torch.bfloat16)
    assert params["output_layer.weight"][3, 0] == torch.tensor(1e5).bfloat16()


def fused_norms(rank, world_size, path):
    """Parameters of a model whose norms have the names of the Transformer Engine spec."""
    folder = HFFolder(path, FLAG)
    with layout(1, 1):
        chunks = build_chunks(read_architecture(folder)[1])
        for layer in chunks[0].decoder.layers:
            layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
            layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            layer.input_layernorm = layer.pre_mlp_layernorm = None
        load_hf_weights(chunks, folder)
        return {n: p.detach().clone() for n, p in chunks[0].named_parameters() if n.endswith("layer_norm_weight")}


def test_norms_inside_linear_layers(gloo_pool, folders):
    (params,) = gloo_pool(1).run(fused_norms, folders["untied"])
    weights = read_weights(folders["untied"])
    assert len(params) == 8
    for n in range(4):
        first = params[f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight"]
        second = params[f"decoder.layers.{n}.mlp.linear_fc1.layer_norm_weight"]
        assert torch.equal(first, weights[f"model.layers.{n}.input_layernorm.weight"])
        assert torch.equal(second, weights[f"model.layers.{n}.post_attention_layernorm.weight"])


def refusal(rank, world_size, path, changes):
    folder = HFFolder(path, FLAG)
    with layout(1, 1):
        chunks = build_chunks(read_architecture(folder)[1], **changes)
        try:
            load_hf_weights(chunks, folder)
        except MkdCheckpointError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, ["4 layers", "3", "--num-layers"]),
        ({"untie_embeddings_and_output_weights": False}, ["lm_head.weight", "--untie-embeddings-and-output-weights"]),
        ({"ffn_hidden_size": 80}, ["gate_proj", "[144, 48]", "decoder.layers.0.mlp.linear_fc1.weight", "[160, 48]"]),
        ({"num_query_groups": 3}, ["q_proj", "decoder.layers.0.self_attention.linear_qkv.weight"]),
        ({"padded_vocab_size": 128}, ["128 vocabulary rows", "131", "--vocab-size"]),
        ({"add_qkv_bias": True}, ["decoder.layers.0.self_attention.linear_qkv.bias", "LlamaForCausalLM"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_model_of_another_shape(gloo_pool, folders, changes, words):
    (message,) = gloo_pool(1).run(refusal, folders["untied"], changes)
    assert all(word in message for word in words), message


def kept_rows(rank, world_size, path, vocab, tp):
    folder = HFFolder(path, FLAG)
    with layout(tp, 1):
        chunks = build_chunks(read_architecture(folder)[1], padded_vocab_size=128)
        load_hf_weights(chunks, folder, vocab)
        return chunks[0].output_layer.weight.detach(), chunks[0].embedding.word_embeddings.weight.detach()


def test_unused_vocabulary_rows_are_not_read(gloo_pool, folders):
    """The folder has 131 tokens, the model 128 rows; the last three tokens are never used."""
    weights = read_weights(folders["untied"])
    shards = gloo_pool(2).run(kept_rows, folders["untied"], 120, 2)
    for n, name in enumerate(("lm_head.weight", "model.embed_tokens.weight")):
        whole = torch.cat([shard[n] for shard in shards])
        assert torch.equal(whole[:120], weights[name][:120])
        assert whole[120:].count_nonzero() == 0


def read_and_held(rank, world_size, path, tp, pp):
    folder = CountingFolder(path, FLAG)
    with layout(tp, pp):
        chunks = build_chunks(read_architecture(folder)[1])
        load_hf_weights(chunks, folder)
        params = dict(chunks[0].named_parameters())
        vocab = sum(p.nbytes for name, p in params.items() if "embedding" in name or "output_layer" in name)
        return folder.bytes_read, sum(p.nbytes for p in params.values()), vocab


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_rank_reads_only_its_own_bytes(gloo_pool, folders, tp, pp):
    for rank, (read, held, vocab) in enumerate(gloo_pool(tp * pp).run(read_and_held, folders["untied"], tp, pp)):
        padding = 0 if vocab == 0 else vocab - vocab * (128 if rank % tp == 0 else 3) // 128
        assert read == held - padding
