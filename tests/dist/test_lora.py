"""Adapters: their gradients are those of the definition in float64, in every layout, and frozen weights have none."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.config.lora import LoraOptions
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.distributed.groups import Groups
from mkd.job.memory.parameters import adapters_of_stage
from mkd.models import shared_weights
from mkd.models.lora import KEY_PREFIX, Lora
from mkd.models.shared_weights import BorrowingBuilder, share_weights
from mkd.teacher.online import OnlineTeacher
from tests.dist.test_hf_families import GLM4, GPT_OSS, NO_SPECIAL_TOKENS, TOKENS, TWO
from tests.dist.test_hf_gradients import RUN, UPSTREAM, run_step
from tests.support.delta_rule import exact_delta_rule
from tests.support.dist.gpt_models import config_from_arguments, layout
from tests.support.hf_folders import SIZES
from tests.support.hf_models import HYBRID_MODELS, MIXER_MODELS, NEAR_MODELS
from tests.support.tolerance import FP32, FP64, norm_error

RANK, ALPHA = 3, 6.0
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, biases": NEAR_MODELS["llama, biases"],
    "phi3": {"model_type": "phi3", "head_dim": 8, "sliding_window": None, **TWO},
    "glm4": GLM4,
    "granite": NEAR_MODELS["granite"],
    "arcee": NEAR_MODELS["arcee"],
    "qwen2 moe": NEAR_MODELS["qwen2 moe"],
    "glm 4.5": NEAR_MODELS["glm 4.5"],
    "deepseek v2": NEAR_MODELS["deepseek v2"],
    "youtu": NEAR_MODELS["youtu, plain queries"],
    "qwen3-next": HYBRID_MODELS["qwen3-next"],
    "qwen3.5": HYBRID_MODELS["qwen3.5"],
    "llama 4": NEAR_MODELS["llama 4"],
    "gpt-oss": GPT_OSS,
    **MIXER_MODELS,
}
"""Queries, keys and values in three Hugging Face layers and in one, with and without a gate, factors and norms on the
outputs, dense layers and shared experts beside routed ones, latent attention, gated delta nets, routed experts in
tensors of their own and of all of them, Mamba layers, experts without gate."""
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
MODULES = {
    "llama, biases": ["q_proj", "v_proj", "down_proj"],
    "qwen2 moe": ["all-linear", *EXPERTS],
    "qwen3-next": ["all-linear", *EXPERTS],
    "llama 4": ["experts.down_proj", "q_proj"],
    "gpt-oss": ["k_proj", *EXPERTS],
    "nemotron 3 nano": ["all-linear", "experts.up_proj", "experts.down_proj"],
}
"""Modules of --kd-lora-modules; all linear layers in other models."""
MIXTURES = ("qwen2 moe", "glm 4.5", "deepseek v2", "qwen3-next", "llama 4", "gpt-oss", "nemotron 3 nano")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> folder with the model in `hf`, its adapters, and their gradients."""
    return {name: reference(tmp_path_factory.mktemp("lora"), name) for name in FAMILIES}


def reference(root: Path, name: str) -> Path:
    """Write a model, adapters, and the gradients of sum(logits * UPSTREAM) by the definition: W + scale B A."""
    torch.manual_seed(5)
    sizes = {**SIZES, **NO_SPECIAL_TOKENS, **FAMILIES[name], "attention_dropout": 0.0}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.float().save_pretrained(root / "hf")
    model.double().train()
    factors, gradients = {}, {}
    weights = dict(model.named_parameters())
    # The rows of a weight, or of each expert's matrix, are its outputs; Llama 4 and gpt-oss have them in columns.
    family, _ = read_architecture(HFFolder(root / "hf", "--hf"))
    modules = {key: family.module_name(key) for key in sorted(adapted_layers(root, name))}
    views = {key: weights.get(f"{module}.weight", weights.get(module)) for key, module in modules.items()}
    views = {key: w.mT if w.dim() == 3 and name in ("llama 4", "gpt-oss") else w for key, w in views.items()}
    for key, weight in views.items():
        *experts, out, inputs = weight.shape
        a, b = (torch.rand(*experts, RANK, inputs) - 0.5) / 3, (torch.rand(*experts, out, RANK) - 0.5) / 3
        factors |= {f"{key}.A": a, f"{key}.B": b}
        weight.data += ALPHA / RANK * b.double() @ a.double()
    with exact_delta_rule():
        model(TOKENS).logits.backward(UPSTREAM.double())
    for key, weight in views.items():
        a, b = (factors[f"{key}.{factor}"].double() for factor in "AB")
        own = weights.get(f"{modules[key]}.weight", weights.get(modules[key])).grad
        own = own.mT if weight.dim() == 3 and name in ("llama 4", "gpt-oss") else own
        gradients[f"{key}.A"] = (ALPHA / RANK * b.mT @ own).contiguous()
        gradients[f"{key}.B"] = (ALPHA / RANK * own @ a.mT).contiguous()
    assert len(factors) == 2 * len(adapted_layers(root, name)) > 4
    save_file(factors, root / "adapters.safetensors")
    save_file(gradients, root / "gradients.safetensors")
    return root


def test_the_definition_is_that_of_peft(models: dict[str, Path]) -> None:
    from peft import LoraConfig, get_peft_model

    root = models["phi3"]
    model = AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.float64, attn_implementation="eager")
    names = sorted({name.rpartition(".")[2] for name in adapted_layers(root, "phi3")})
    config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).double().train()
    values, gradients = (load_file(root / f"{name}.safetensors") for name in ("adapters", "gradients"))
    factors = {
        name.removeprefix("base_model.model.").replace(".lora_", ".").removesuffix(".default.weight"): param
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    assert factors.keys() == values.keys()
    for name, param in factors.items():
        param.data.copy_(values[name])
    model(TOKENS).logits.backward(UPSTREAM.double())
    assert max(norm_error(param.grad, gradients[name]) for name, param in factors.items()) < FP64


def options_of(name: str) -> LoraOptions:
    return LoraOptions.parse(f"{RANK}:{ALPHA}", MODULES.get(name))


def adapted_layers(root: Path, name: str) -> set[str]:
    family, args = read_architecture(HFFolder(root / "hf", "--hf"))
    return {layer for linear in adapted_linears(family, args, options_of(name)) for layer in linear.layers}


def adapters_of(chunk: nn.Module) -> dict[str, nn.Module]:
    """The adapters of a model chunk by name; empty without adapters."""
    return dict(getattr(chunk, KEY_PREFIX.rstrip("."), {}))


def errors_of(
    rank: int, world_size: int, models: dict[str, Path], tp: int, pp: int, ep: int, etp: int, sp: bool, run: dict
) -> dict:
    """(model, layer and factor) -> error of the gradient on this rank."""
    errors = {}
    with layout(tp, pp, ep=ep, etp=etp):
        for name, root in models.items():
            model = build(root, name, ep, {"sequence_parallel": sp, **run})
            adapters, gradients = adapters_of(model), load_file(root / "gradients.safetensors")
            values = load_file(root / "adapters.safetensors")
            each = [(one, factor) for one in adapters.values() for factor in one.factors]
            for one, factor in each:
                whole = values[f"{factor.layer}.{'A' if factor.part is None else 'B'}"]
                getattr(one, factor.name).data.copy_(one.shard(factor, whole))
            run_step(model)
            for one, factor in each:
                whole = gradients[f"{factor.layer}.{'A' if factor.part is None else 'B'}"]
                found = getattr(one, factor.name).grad
                if factor.experts is not None:
                    found = of_all_ranks(getattr(one, factor.name))
                errors[f"{name}: {factor.key}"] = norm_error(found, one.shard(factor, whole))
            frozen = [n for n, p in model.named_parameters() if p.requires_grad and not n.startswith("kd_lora.")]
            assert frozen == []
    return errors


def of_all_ranks(parameter: nn.Parameter) -> Tensor:
    """The gradient of a factor of experts for one batch; experts get the tokens of all ranks, here equal batches."""
    total = parameter.grad.clone()
    if not parameter.allreduce:
        dist.all_reduce(total, group=ps.get_expert_data_parallel_group())
    return total / ps.get_data_parallel_world_size()


def build(root: Path, name: str, ep: int, run: dict[str, Any]) -> nn.Module:
    """This rank's chunk of the model with adapters, as a job builds it."""
    folder = HFFolder(root / "hf", "--hf")
    family, args = read_architecture(folder)
    config = config_from_arguments(args | RUN | run, ep)
    lora = Lora(options_of(name), adapted_linears(family, args, options_of(name)), seed=1)
    config.pre_wrap_hooks += [lambda chunks: load_hf_weights(chunks, folder) or chunks, lora.attach]
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    (chunk,) = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    return chunk


def shared_storage(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Parameters in bf16 of a student, those that are not in the teacher's memory, and bytes that it has before."""
    shared_weights._LARGE = 256
    with layout(2, 1):
        groups = Groups.from_megatron()
        folder = HFFolder(root / "hf", "--hf")
        family, args = read_architecture(folder)
        config = config_from_arguments(args | RUN, dtype=torch.bfloat16)
        teacher = OnlineTeacher.build(config, groups, lambda chunks: load_hf_weights(chunks, folder), fingerprint="")
        lora = Lora(LoraOptions(2, 2.0), adapted_linears(family, args, LoraOptions(2, 2.0)), seed=1)
        own = config_from_arguments(args | RUN, dtype=torch.bfloat16)
        own.builder, before = BorrowingBuilder.PATH, []

        def share(chunks: list[GPTModel]) -> list[GPTModel]:
            before.extend(param.untyped_storage().nbytes() for param in chunks[0].parameters())
            share_weights(chunks, teacher.model)
            return chunks

        own.pre_wrap_hooks += [share, lora.attach]
        built = own.get_builder_cls()(own).build_distributed_models(groups.collection, wrap_with_ddp=False)
        chunk = unwrap_model(built[0])
        theirs = {param.data_ptr() for param in teacher.model.parameters()}
        count = sum(factor.numel() for one in adapters_of(chunk).values() for factor in one.parameters())
        needed = Namespace(**{**args, "tensor_model_parallel_size": 2, **ONE_STAGE})
        return {
            "own": {name for name, param in chunk.named_parameters() if param.data_ptr() not in theirs},
            "counted": adapters_of_stage(lora, needed, 0).total == count > 0,
            "trained": {name for name, param in chunk.named_parameters() if param.requires_grad},
            "largest": max(before),
        }


ONE_STAGE = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    **dict.fromkeys(names_with(ArgRole.STAGES)),
}


def test_one_copy_of_weights_that_are_the_teachers(gloo_pool: Any, models: dict[str, Path]) -> None:
    for found in gloo_pool(2).run(shared_storage, models["glm4"]):
        assert found["own"] == found["trained"] != set()
        assert all(name.startswith("kd_lora.") for name in found["own"])
        assert found["counted"]
        assert found["largest"] <= 4 * 256


CASES = {
    "one rank, recomputed": (
        *(1, 1, 1, 1, False),
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "TP2": (2, 1, 1, 1, False, {}),
    "TP2 SP": (2, 1, 1, 2, True, {}),
    "TP2 SP, ETP1": (2, 1, 1, 1, True, {}),
    "PP2": (1, 2, 1, 1, False, {}),
    "EP2": (1, 1, 2, 1, False, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(gloo_pool: Any, models: dict[str, Path], case: tuple) -> None:
    tp, pp, ep, etp, sp, run = case
    some = {name: root for name, root in models.items() if (ep == 1 and etp == tp) or not sp or name in MIXTURES}
    some = {name: root for name, root in some.items() if ep == 1 or name in MIXTURES}
    # Megatron does not shard experts with biases.
    some = {name: root for name, root in some.items() if etp == 1 or name != "gpt-oss"}
    # Megatron does not shard experts over tensor-parallel ranks without sequence parallelism.
    some = {name: root for name, root in some.items() if tp == 1 or sp or name not in MIXTURES}
    results = gloo_pool(tp * pp * ep).run(errors_of, some, tp, pp, ep, etp, sp, run)
    for errors in results:
        assert errors
        assert {key: error for key, error in errors.items() if not error <= FP32} == {}
