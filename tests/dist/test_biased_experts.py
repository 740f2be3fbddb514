"""Gradients of gpt-oss on CPU are those of transformers: sinks, biases, experts."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from tests.dist.test_hf_families import GPT_OSS, TOKENS
from tests.dist.test_layouts import compare
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.dist.kd_step import Layout, Models
from tests.support.hf_folders import make_model
from tests.support.tolerance import GRADIENT, assert_close_norm

NAMES = {
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}
UPSTREAM = torch.randn(*TOKENS.shape, 131, generator=torch.Generator().manual_seed(3))


def gradients(rank: int, size: int, path: str) -> dict[str, Tensor]:
    """transformers' name -> gradient; one of the experts is stacked."""
    with layout(1, 1):
        folder = HFFolder(path, "--hf")
        (model,) = build_from_arguments(read_architecture(folder)[1])
        load_hf_weights([model], folder)
        length = TOKENS.shape[1]
        mask = torch.ones(length, length).triu(1).bool()[None, None]
        model(TOKENS, torch.arange(length).expand_as(TOKENS), mask)[..., :131].backward(UPSTREAM)
        layer = model.decoder.layers[0]
        found = {name: layer.get_parameter(own).grad for name, own in NAMES.items()}
        experts = [expert.linear_fc2 for expert in layer.mlp.experts.local_experts]
        found["mlp.experts.down_proj_bias"] = torch.stack([expert.bias.grad for expert in experts])
        found["mlp.experts.down_proj"] = torch.stack([expert.weight.grad.T for expert in experts])
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return make_model(tmp_path_factory.mktemp("experts") / "hf", **{**GPT_OSS, **tokens})


def test_gradients_equal_transformers(gloo_pool, folder):
    (found,) = gloo_pool(1).run(gradients, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    model(TOKENS).logits.backward(UPSTREAM)
    assert len(found) == 6
    for name, value in found.items():
        assert_close_norm(value, model.model.layers[0].get_parameter(name).grad, GRADIENT, name)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, Layout(tp=2, sp=True, etp=1), id="tp2-sp-etp1"),
        pytest.param(4, Layout(tp=2, sp=True, etp=1, ep=2), id="tp2-sp-etp1-ep2"),
        pytest.param(4, Layout(tp=2, sp=True, etp=1, pp=2), id="tp2-sp-etp1-pp2"),
    ],
)
def test_biased_experts_on_whole_ranks(gloo_pool, ranks, layout):
    """Experts that tensor parallelism does not shard: gradients are those of one rank."""
    compare(gloo_pool, ranks, layout, Models(moe=True, biases=True))
