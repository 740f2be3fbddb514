"""Rollouts of one tensor-parallel layout: their texts, and with --speed the tokens per second. Runs under torchrun.

torchrun --standalone --nproc-per-node 2 -m tests.support.gpu.rollout_ranks --out two.json --speed 64 256
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder

import mkd.rollout.engine.token_layout
from mkd.distributed.groups import Groups
from mkd.distributed.peer_memory import peer_memory
from mkd.models.gpt import gpt_config
from mkd.rollout.engine.block_sum import BlockSums, add_outputs_reference
from mkd.rollout.interface import Decoding, Request
from mkd.rollout.write import write_texts
from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import PADDED, Layout, fill, model_arguments, parallel_state

SMALL: dict[str, Any] = dict(
    num_layers=4, hidden_size=256, ffn_hidden_size=512, num_attention_heads=8, num_query_groups=2, kv_channels=64
)
LLAMA_1B: dict[str, Any] = dict(
    num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8, kv_channels=64
)
LARGE_VOCAB = 128256
CHOICES = {"greedy": {}, "sampled": dict(temperature=1.0), "top-p": dict(temperature=1.0, top_p=0.9)}
"""Decoding options by name."""
ON_GPU = torch.cuda.is_available() and os.environ.get("MKD_DEVICE") != "cpu"


def student(sizes: dict[str, Any], layout: Layout, groups: Groups, dtype: torch.dtype, vocab: int, padded: int) -> list:
    """A model with Transformer Engine's layers, where a GPU is."""
    args = model_arguments(sizes, layout, True, vocab, padded)
    args.transformer_impl, args.max_position_embeddings = "transformer_engine" if ON_GPU else "local", 4096
    args.params_dtype, args.bf16 = dtype, dtype == torch.bfloat16
    args.apply_rope_fusion = args.bias_swiglu_fusion = ON_GPU  # Megatron's defaults
    args.perform_initialization, args.use_cpu_initialization = True, False
    return GPTModelBuilder(gpt_config(args)).build_distributed_models(
        pg_collection=groups.collection, wrap_with_ddp=False, data_parallel_random_init=False
    )


def small_student(layout: Layout, groups: Groups) -> list:
    """A student in fp32 whose weights depend on no layout."""
    chunks = student(SMALL, layout, groups, torch.float32, VOCAB, PADDED)
    fill(chunks, "student")
    return chunks


def texts(chunks: list, layout: Layout, groups: Groups) -> dict[str, list[list[int]]]:
    """Texts of `small_student` by the choice of their tokens; half of the slots are used twice, by longer prompts."""
    generator = torch.Generator().manual_seed(2)
    lengths = [5, 60, 17, 33, 80, 90, 7, 100]
    requests = [Request(tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist())) for n in lengths]
    found = {}
    for name, options in CHOICES.items():
        decoding = Decoding(48, frozenset(), VOCAB, 4, 256, seed=3, length_multiple=layout.tp, **options)
        found[name] = [list(one.tokens) for one in write_texts(chunks, groups, requests, decoding, "cached")]
    return found


def kernel_differences(groups: Groups) -> dict[str, float]:
    """Largest differences of sums of outputs in bf16: of two ranks, of the residual stream from the definition, and the
    relative ones of its norm."""
    from mkd.rollout.engine.block_sum_kernel import add_outputs_triton

    group, shape, dtype = groups.tp, (64, 2048), torch.bfloat16
    memory = peer_memory(group, BlockSums.bytes_of(shape, dtype, group.size()))
    sums = BlockSums.of(memory, group.rank(), shape, dtype)
    found = dict.fromkeys(("ranks", "residual", "norm"), 0.0)
    for call in range(6):
        generator = torch.Generator("cuda").manual_seed(call)
        residual, *made = (
            torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(1 + group.size())
        )
        norm = torch.rand(shape[1], device="cuda", generator=generator).to(dtype), 1e-5, False
        partials = sums.partials[call % 2]
        partials[group.rank()].copy_(made[group.rank()])
        hidden, normed = add_outputs_triton(partials, sums.flags, group.rank(), residual[:, None], norm)
        expected = add_outputs_reference(made, residual[:, None], norm)
        every = [torch.empty_like(normed) for _ in made]
        dist.all_gather(every, normed, group=group)
        differences = {
            "ranks": every[0] - every[-1],
            "residual": hidden - expected[0],
            "norm": (normed - expected[1]) / expected[1].abs().clamp(min=1e-6),
        }
        found = {name: max(found[name], one.abs().max().item()) for name, one in differences.items()}
    return found


def large_student(layout: Layout, groups: Groups) -> list:
    """A student in bf16 with the shape of Llama-3.2-1B."""
    chunks = student(LLAMA_1B if ON_GPU else SMALL, layout, groups, torch.bfloat16, LARGE_VOCAB, LARGE_VOCAB)
    for parameter in unwrap_model(chunks[0]).parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 3.0 / parameter.shape[-1] ** 0.5)
    return chunks


def speed(chunks: list, layout: Layout, groups: Groups, rows: int, tokens: int) -> float:
    """Tokens per second of `large_student` with prompts of 128 tokens, in the second call; all replicas together.

    Each data-parallel rank writes `rows` texts at once.
    """
    count = rows * groups.dp.size()
    requests = [Request(tuple(range(i, i + 128))) for i in range(count)]
    for new in (8, tokens):
        options = Decoding(new, frozenset(), LARGE_VOCAB, rows, 640, temperature=1.0, length_multiple=layout.tp)
        torch.cuda.synchronize()
        began = time.perf_counter()
        write_texts(chunks, groups, requests, options, "cached")
        torch.cuda.synchronize()
    return count * tokens / (time.perf_counter() - began)


def profile(chunks: list, layout: Layout, groups: Groups, rows: int) -> list[str]:
    """The kernels that take most of the time of a rollout of 64 tokens of `large_student`."""
    requests = [Request(tuple(range(i, i + 128))) for i in range(rows)]
    options = Decoding(64, frozenset(), LARGE_VOCAB, rows, 640, temperature=1.0, length_multiple=layout.tp)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        write_texts(chunks, groups, requests, options, "cached")
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    return [f"{one.self_device_time_total / 1e3:8.2f} ms {one.count:6d} x {one.key[:90]}" for one in events[:18]]


@contextmanager
def ranks() -> Iterator[int]:
    """The process group of torchrun's ranks; their number."""
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    yield dist.get_world_size()
    dist.destroy_process_group()  # after an error in a capture it would not return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--nccl", action="store_true", help="sums by NCCL, as between hosts")
    parser.add_argument("--speed", type=int, nargs="*", default=[], help="texts at once")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of --speed")
    parser.add_argument("--profile", type=int, help="texts at once of a profile")
    flags = parser.parse_args()
    reasons: list[str] = []
    mkd.rollout.engine.token_layout._report = reasons.append
    if flags.nccl:
        mkd.rollout.engine.token_layout._block_sums = lambda *_: ()
    with ranks() as count:
        layout = Layout(tp=count, sp=flags.sequence_parallel)
        with parallel_state(layout):
            groups = Groups.from_megatron()
            found: dict[str, Any] = {"texts": texts(small_student(layout, groups), layout, groups)}
            if ON_GPU and not flags.nccl:
                found["differences"] = kernel_differences(groups)
            chunks = large_student(layout, groups) if flags.speed or flags.profile else []
            found["speed"] = {rows: speed(chunks, layout, groups, rows, flags.tokens) for rows in flags.speed}
            if flags.profile:
                found["profile"] = profile(chunks, layout, groups, flags.profile)
            found["reasons_for_nccl"] = reasons
            if dist.get_rank() == 0:
                flags.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
