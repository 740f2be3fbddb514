"""On a GPU with Transformer Engine: the folder that a running job writes for rollout servers, and the student's own
log-probabilities beside those of transformers.

pytest -m gpu tests/gpu/test_live_export.py -s
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelBuilder
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.checkpoint.live_export import LiveExport, LiveModel
from mkd.config.flags import default_arguments
from mkd.cpu.flags import set_cpu_values
from mkd.distributed.groups import Groups
from mkd.models.gpt import gpt_config
from mkd.rollout.interface import Decoding
from mkd.rollout.own_scores import own_scores
from mkd.rollout.served.server import StudentWeights
from tests.support.dist.kd_step import Layout, parallel_state
from tests.support.hf_folders import make_model, read_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True, **SMALL},
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 128,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **SMALL,
    },
}
LLAMA_1B = SMALL | {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
TEXT = tuple((7919 * number) % 1000 for number in range(1, 65))


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    with parallel_state(Layout()):
        yield Groups.from_megatron()
    dist.destroy_process_group()


def student(folder: HFFolder, groups: Groups, dtype: torch.dtype) -> tuple[list, Namespace]:
    args = default_arguments()
    vars(args).update(read_architecture(folder)[1])
    args.tensor_model_parallel_size = args.pipeline_model_parallel_size = 1
    args.expert_model_parallel_size = args.expert_tensor_parallel_size = 1
    args.moe_token_dispatcher_type = "alltoall"
    set_cpu_values(args)  # no extension of Apex
    args.transformer_impl, args.use_cpu_initialization = "transformer_engine", False
    args.params_dtype, args.bf16 = dtype, dtype == torch.bfloat16
    args.perform_initialization, args.padded_vocab_size = False, -(-args.vocab_size // 128) * 128
    chunks = GPTModelBuilder(gpt_config(args)).build_distributed_models(
        pg_collection=groups.collection, wrap_with_ddp=False, data_parallel_random_init=False
    )
    chunks = [unwrap_model(chunk) for chunk in chunks]
    load_hf_weights(chunks, folder)
    return chunks, args


def transformers_scores(path: Path, dtype: torch.dtype) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda()
    with torch.no_grad():
        scores = model(torch.tensor([TEXT], device="cuda")).logits[0, :-1].float().log_softmax(-1)
    return scores[torch.arange(len(TEXT) - 1), list(TEXT[1:])].double().cpu().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_bit_equal(groups: Groups, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = HFFolder(make_model(tmp_path / "hf", dtype=dtype, **MODELS[name]), "--hf")
    chunks, args = student(folder, groups, dtype)
    (tmp_path / "out").mkdir()
    LiveExport(LiveModel(args, folder.path, "--kd-rollout-url"), chunks).write(tmp_path / "out")
    before, after = read_weights(folder.path), read_weights(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    options = Decoding(8, frozenset(), SMALL["vocab_size"], 1, 96)
    found = own_scores(chunks, groups, TEXT, options)
    distance = np.abs(found - transformers_scores(tmp_path / "out", dtype))
    print(f"{name}, {dtype}: log-probabilities differ from transformers' by {distance.mean():.5f} nats on average, ")
    print(f"{distance.max():.5f} at most; their mean is {found.mean():.2f}")
    assert distance.mean() < StudentWeights(folder.path, 0, TEXT, found).limit


def test_time_of_an_export(groups: Groups, tmp_path: Path) -> None:
    """A student with the shape of Llama-3.2-1B, in bf16."""
    folder = HFFolder(make_model(tmp_path / "hf", dtype=torch.bfloat16, **LLAMA_1B), "--hf")
    chunks, args = student(folder, groups, torch.bfloat16)
    for number in range(2):
        out = tmp_path / f"out{number}"
        out.mkdir()
        torch.cuda.synchronize()
        began = time.monotonic()
        LiveExport(LiveModel(args, folder.path, "--kd-rollout-url"), chunks).write(out)
        print(f"export of {sum(p.numel() for p in chunks[0].parameters()) / 1e9:.2f}B parameters: ")
        print(f"{time.monotonic() - began:.2f} s")
    began = time.monotonic()
    own_scores(chunks, groups, TEXT, Decoding(8, frozenset(), 128256, 1, 96))
    print(f"scores of {len(TEXT)} tokens: {time.monotonic() - began:.3f} s")
