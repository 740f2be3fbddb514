"""On a GPU with Transformer Engine: cached decoding writes the texts that whole forward passes write, and its speed.

pytest -m gpu tests/gpu/test_rollout.py -s
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder

from mkd.distributed.groups import Groups
from mkd.models.gpt import gpt_config
from mkd.rollout.engine.sampler import NextToken
from mkd.rollout.interface import Decoding, Request, WrittenText
from mkd.rollout.write import write_texts
from tests.support.dist.kd_step import Layout, model_arguments, parallel_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL: dict[str, Any] = dict(
    num_layers=4, hidden_size=256, ffn_hidden_size=512, num_attention_heads=8, num_query_groups=2, kv_channels=64
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "biases and norms": SMALL | {"add_qkv_bias": True, "qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    "biases of attention": SMALL | {"add_qkv_bias": True, "attention_output_bias": True},
    "windows": SMALL | {"window_size": (16, 0), "window_attn_skip_freq": 2},
    "experts": SMALL | {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128},
}
LLAMA_1B: dict[str, Any] = dict(
    num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8, kv_channels=64
)
VOCAB, LONGEST = 1000, 256
BORDER = 2e-5
"""Distance from top-p below which rounding decides: logits of both engines differ by up to 2e-3 in these models, sums
of probabilities by 6e-6 where a text differed on an H200."""


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with parallel_state(Layout()):
        yield Groups.from_megatron()
    dist.destroy_process_group()


def student(sizes: dict[str, Any], groups: Groups, dtype: torch.dtype, vocab: int = VOCAB) -> list:
    args = model_arguments(sizes, Layout(), True, vocab, -(-vocab // 128) * 128)
    args.transformer_impl, args.max_position_embeddings = "transformer_engine", 4096
    args.params_dtype, args.bf16 = dtype, dtype == torch.bfloat16
    args.perform_initialization, args.use_cpu_initialization = True, False
    torch.manual_seed(1)
    chunks = GPTModelBuilder(gpt_config(args)).build_distributed_models(
        pg_collection=groups.collection, wrap_with_ddp=False, data_parallel_random_init=False
    )
    with torch.no_grad():
        for name, parameter in unwrap_model(chunks[0]).named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 3.0 / parameter.shape[-1] ** 0.5)
            elif name.endswith(".bias"):
                parameter.normal_()
    return chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_changes_no_text(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """To the last token in fp32, unless rounding decides which tokens top-p keeps; in bf16 most texts, since the sums
    are in another order."""
    logits: list[torch.Tensor] = []
    choose = NextToken._choose

    def choose_and_keep(self: NextToken, values: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            logits.append(values.detach().clone())
        return choose(self, values, keys)

    monkeypatch.setattr(NextToken, "_choose", choose_and_keep)
    chunks = student(MODELS[name], groups, dtype)
    generator = torch.Generator().manual_seed(2)
    lengths = (5, 60, 17, 33)
    requests = [Request(tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist())) for n in lengths]
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)):
        options = Decoding(48, frozenset(), VOCAB, 2, LONGEST, temperature=temperature, top_p=top_p, seed=3)
        cached = write_texts(chunks, groups, requests, options, "cached")
        logits.clear()
        whole = write_texts(chunks, groups, requests, options, "uncached")
        alike = [
            sum(a == b for a, b in zip(one.tokens, other.tokens, strict=True)) / 48
            for one, other in zip(cached, whole, strict=True)
        ]
        print(f"{name}, {dtype}, T = {temperature}, top-p {top_p}: equal tokens {alike}")
        if dtype != torch.float32 or os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
            assert max(alike) > 0.3
        elif top_p == 1.0:
            assert min(alike) == 1.0
        else:
            gaps = [
                border_gap(logits, *pair, number, top_p) for number, pair in enumerate(zip(cached, whole, strict=True))
            ]
            print(f"  distance of the probabilities that top-p keeps from {top_p}, where a token differs: {gaps}")
            assert all(gap is None or gap < BORDER for gap in gaps) and max(alike) == 1.0


def border_gap(
    logits: list[torch.Tensor], one: WrittenText, other: WrittenText, number: int, top_p: float
) -> float | None:
    """At the first token that differs in two texts, the distance from `top_p` of the nearest sum of the largest
    probabilities; None if no token differs.

    Args:
        logits: of each microbatch of two texts, token after token, of whole forward passes.
        one, other: the texts.
        number: of the text.
        top_p: the threshold.
    """
    differs = [a != b for a, b in zip(one.tokens, other.tokens, strict=True)]
    if not any(differs):
        return None
    row = logits[2 * differs.index(True) + number // 2][number % 2, :VOCAB]
    sums = row.double().softmax(dim=0).sort(descending=True).values.cumsum(dim=0)
    return float((sums - top_p).abs().min())


@pytest.mark.parametrize("rows", [64, 256])
def test_speed(groups: Groups, rows: int) -> None:
    """Student of Llama-3.2-1B's shape, prompts of 128 tokens, 512 new ones."""
    chunks = student(LLAMA_1B, groups, torch.bfloat16, vocab=128256)
    requests = [Request(tuple(range(i, i + 128))) for i in range(rows)]
    for temperature in (0.0, 1.0):
        options = Decoding(512, frozenset(), 128256, rows, 640, temperature=temperature)
        write_texts(chunks, groups, requests, Decoding(8, frozenset(), 128256, rows, 640), "cached")
        torch.cuda.synchronize()
        began = time.perf_counter()
        write_texts(chunks, groups, requests, options, "cached")
        seconds = time.perf_counter() - began
        print(f"{rows} texts, T = {temperature}: {rows * 512 / seconds:,.0f} tokens/s")
