"""Every family: the gradient of each parameter is that of transformers' autograd, and packed rows keep samples apart.

The gradients of transformers are saved as a Hugging Face folder, and read by the names of Megatron's parameters.
Without `-m slow`, models whose tensors are split as those of another model run on one rank only; `-m slow` runs every
model in every layout.
"""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.layouts import TensorShard
from mkd.checkpoint.hf.load import HFParameters, global_name, load_hf_weights
from mkd.models.model_options import ModelOptions
from tests.dist.test_hf_families import ALIKE, MODELS, NO_SPECIAL_TOKENS, TOKENS
from tests.support.delta_rule import exact_delta_rule
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.hf_folders import make_model, reference_logits
from tests.support.hf_models import HYBRID_MODELS
from tests.support.tolerance import FP32, LOGITS, gradient_error

VOCAB = 131
UPSTREAM = torch.randn(*TOKENS.shape, VOCAB, generator=torch.Generator().manual_seed(3))
RUN = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none", "overlap_p2p_comm": False}
LAYOUTS = {"TP1": (1, 1, 1), "TP2 SP": (2, 1, 1), "PP2": (1, 2, 1), "EP2": (1, 1, 2)}
FIRST_SAMPLE = 10
"""Length of the first sample of a packed row."""
# Megatron does not shard experts with biases (test_biased_experts.py), and the softcap of Gemma 2's logits is a part of
# mkd's loss (test_family_steps.py).
TRAINED = {name: sizes for name, sizes in MODELS.items() if sizes["model_type"] not in ("gpt_oss", "gemma2")}


def save_gradients(folder: Path, out: Path) -> None:
    """Write the gradients of sum(logits * UPSTREAM) under the names of the folder's tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    with exact_delta_rule():
        model(TOKENS).logits.backward(UPSTREAM)
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    model.save_pretrained(out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> (Hugging Face folder, folder of its gradients, logits of the two samples of a packed row)."""
    found = {}
    for name, sizes in TRAINED.items():
        root = tmp_path_factory.mktemp("gradients")
        make_model(root / "hf", **{**NO_SPECIAL_TOKENS, **sizes, "attention_dropout": 0.0})
        save_gradients(root / "hf", root / "gradients")
        samples = TOKENS[:1].split([FIRST_SAMPLE, TOKENS.shape[1] - FIRST_SAMPLE], dim=1)
        logits = torch.cat([reference_logits(root / "hf", tokens) for tokens in samples], dim=1)
        found[name] = (root / "hf", root / "gradients", logits)
    return found


def errors_of(rank: int, world_size: int, folders: dict, tp: int, pp: int, ep: int) -> dict[str, float]:
    """(model, parameter) -> relative error of the gradient; "packed" for the logits of a packed row."""
    errors = {}
    with layout(tp, pp, ep=ep):
        for name, (hf, gradients, packed_logits) in folders.items():
            folder = HFFolder(hf, "--hf")
            family, args = read_architecture(folder)
            chunks = build_from_arguments(args | RUN | {"sequence_parallel": tp > 1}, ep)
            load_hf_weights(chunks, folder)
            if pp == 1:
                logits = run_packed(chunks[0])
                errors[f"{name}: packed"] = (logits - packed_logits).abs().max().item()
            run_step(chunks[0])
            expected = HFParameters(HFFolder(gradients, "--hf"), family, args)
            options = ModelOptions.of(Namespace(**args))
            errors |= {f"{name}: {key}": error for key, error in gradient_errors(chunks[0], expected, options).items()}
    return errors


@torch.no_grad()
def run_packed(model: GPTModel) -> Tensor:
    """[1, s, V] logits of a row of two samples."""
    length = TOKENS.shape[1]
    bounds = torch.tensor([0, FIRST_SAMPLE, length], dtype=torch.int32)
    longest = max(FIRST_SAMPLE, length - FIRST_SAMPLE)
    packed = PackedSeqParams("thd", bounds, bounds, bounds, bounds, longest, longest)
    positions = torch.cat([torch.arange(FIRST_SAMPLE), torch.arange(length - FIRST_SAMPLE)])[None]
    return model(TOKENS[:1], positions, None, packed_seq_params=packed)[..., :VOCAB]


def run_step(model: GPTModel) -> None:
    """Forward and backward pass through all pipeline stages, and the sums of gradients over ranks."""
    length = TOKENS.shape[1]
    mask = torch.ones(length, length).triu(1).bool()[None, None]

    def forward(batches, model):
        logits = model(TOKENS, torch.arange(length).expand_as(TOKENS), mask)
        return logits, lambda logits: ((logits[..., :VOCAB] * UPSTREAM).sum(), {})

    model.train()
    get_forward_backward_func(pp_size=ps.get_pipeline_model_parallel_world_size(), vp_size=None)(
        forward_step_func=forward,
        data_iterator=None,
        model=[model],
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=len(TOKENS),
        forward_only=False,
    )
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(param.grad, group=ps.get_tensor_model_parallel_group())
    if model.share_embeddings_and_output_weights and ps.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(model.shared_embedding_or_output_weight().grad, group=ps.get_embedding_group())


def gradient_errors(model: nn.Module, expected: HFParameters, options: ModelOptions) -> dict[str, float]:
    errors = {}
    for name, param in model.named_parameters():
        is_expert = ".experts." in name
        group = model.pg_collection.expt_tp if is_expert else model.pg_collection.tp
        value = expected.read(global_name(model, name), TensorShard(group.rank(), group.size()), tuple(param.shape))
        # Experts receive the tokens of all expert-parallel ranks, here equal ones.
        found = param.grad / ps.get_expert_model_parallel_world_size() if is_expert else param.grad
        errors[name] = gradient_error(name, found, value, options)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_every_model(gloo_pool, folders, sizes):
    assert_gradients_and_packed_rows(gloo_pool, folders, sizes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_packed_rows(gloo_pool, folders, name):
    some = {name: value for name, value in folders.items() if name not in ALIKE}
    assert_gradients_and_packed_rows(gloo_pool, folders if name == "TP1" else some, LAYOUTS[name])


def assert_gradients_and_packed_rows(gloo_pool, folders, sizes):
    tp, pp, ep = sizes
    some = {name: value for name, value in folders.items() if ep == 1 or "num_experts_per_tok" in MODELS[name]}
    for errors in gloo_pool(tp * pp * ep).run(errors_of, some, tp, pp, ep):
        assert len(errors) > 5 * len(some)
        bounds = {name: FP32 if _is_decay(name) else LOGITS for name in errors}
        assert {name: error for name, error in errors.items() if not error <= bounds[name]} == {}


def _is_decay(name: str) -> bool:
    """True for the parameters of the decays of a gated delta net."""
    return name.partition(":")[0] in HYBRID_MODELS and name.endswith(("A_log", "dt_bias"))
