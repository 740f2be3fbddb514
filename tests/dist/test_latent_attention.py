"""mkd/cpu/latent_attention.py: latent attention's gradients do not depend on tensor parallelism."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.cpu import latent_attention
from tests.dist.test_hf_families import DEEPSEEK, TOKENS
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.hf_folders import make_model
from tests.support.tolerance import GRADIENT, assert_close_norm


def gradients(rank: int, size: int, path: str, is_sequence_parallel: bool, method: str) -> dict[str, Tensor]:
    """Parameter of the attention -> its gradient on this rank; norms' are summed over the sequence."""
    repaired = MLASelfAttention._qkv_down_projection
    MLASelfAttention._qkv_down_projection = getattr(latent_attention, method)
    try:
        with layout(size, 1):
            folder = HFFolder(path, "--hf")
            (model,) = build_from_arguments(read_architecture(folder)[1] | {"sequence_parallel": is_sequence_parallel})
            load_hf_weights([model], folder)
            model.eval()  # Megatron trains mixtures under tensor parallelism only with sequence parallelism
            length = TOKENS.shape[1]
            mask = torch.ones(length, length).triu(1).bool()[None, None]
            logits = model(TOKENS, torch.arange(length).expand_as(TOKENS), mask)[..., :131]
            logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)))
            found = {name: param for name, param in model.named_parameters() if "self_attention" in name}
            for param in found.values():
                if getattr(param, "sequence_parallel", False):
                    dist.all_reduce(param.grad)
            return {name: param.grad for name, param in found.items()}
    finally:
        MLASelfAttention._qkv_down_projection = repaired


def whole(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The gradient of a parameter that is not cut, or cut by rows or columns."""
    if parts[0].shape == shape:
        return parts[0]
    return torch.cat(parts, dim=0 if parts[0].shape[1:] == shape[1:] else 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return make_model(tmp_path_factory.mktemp("latent") / "hf", **{**DEEPSEEK, **tokens})


@pytest.fixture(scope="module")
def expected(gloo_pool, folder):
    return gloo_pool(1).run(gradients, folder, False, "project_down")[0]


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["whole sequence", "sequence parallel"])
def test_gradients_do_not_depend_on_tp(gloo_pool, folder, expected, is_sequence_parallel):
    results = gloo_pool(2).run(gradients, folder, is_sequence_parallel, "project_down")
    assert len(expected) == 2 * 7
    for name, value in expected.items():
        assert_close_norm(whole([found[name] for found in results], value.shape), value, GRADIENT, name)


def test_megatrons_own_still_loses_gradients(gloo_pool, folder, expected):
    results = gloo_pool(2).run(gradients, folder, False, "UPSTREAM")
    (name,) = [name for name in expected if "layers.1." in name and "kv_down" in name]
    error = whole([found[name] for found in results], expected[name].shape) - expected[name]
    assert error.norm() > 0.1 * expected[name].norm()
