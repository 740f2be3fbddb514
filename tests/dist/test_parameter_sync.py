"""Before a model uses a parameter, it calls the module that owns it or waits for the module's parameters: with
--overlap-param-gather, the data-parallel wrapper gathers them until then."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn

from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.hf.families import family_of
from mkd.config.lora import LoraOptions
from mkd.models.lora import Lora
from tests.dist.test_hf_families import GPT_OSS, MODELS
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.hf_folders import SIZES
from tests.support.hf_models import HYBRID_MODELS, MIXER_MODELS

ONE_PER_TYPE = {MODELS[name]["model_type"]: MODELS[name] for name in MODELS}
"""The last model of each type, which has the most of its options."""
ADAPTED = {"gpt-oss": GPT_OSS, "qwen3-next": HYBRID_MODELS["qwen3-next"], **MIXER_MODELS}
"""Models that train adapters too, of routed experts and of linear layers."""


def unwaited(model: GPTModel) -> list[str]:
    """Names of the trained parameters whose modules are neither called in a forward pass nor waited for."""
    reached: set[nn.Module] = set()
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, inputs: reached.add(module))
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(24, 24).triu(1).bool()[None, None]
    model(tokens, torch.arange(24).expand_as(tokens), mask)
    owners = {
        name: model.get_submodule(name.rpartition(".")[0]) for name, p in model.named_parameters() if p.requires_grad
    }
    return [name for name, owner in owners.items() if owner not in reached]


def all_unwaited(rank: int, size: int, models: dict[str, dict[str, Any]], is_adapted: bool) -> dict[str, list[str]]:
    found = {}
    with layout(1, 1):
        for name, sizes in models.items():
            config = {**SIZES, **sizes}
            family = family_of(config)
            args = family.megatron_args(config)
            (model,) = build_from_arguments(
                args | {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
            )
            for parameter in model.parameters():
                parameter.data.normal_(0.0, 0.02)
            if is_adapted:
                experts = ["experts.up_proj" if "nano" in name else "experts.gate_up_proj", "experts.down_proj"]
                modules = ["all-linear", *experts] if args["num_experts"] else None
                options = LoraOptions.parse("2", modules)
                Lora(options, adapted_linears(family, args, options), seed=1).attach([model])
            found[name] = unwaited(model)
    return found


def test_every_parameter_is_waited_for(gloo_pool: Any) -> None:
    (found,) = gloo_pool(1).run(all_unwaited, {**ONE_PER_TYPE, **MIXER_MODELS}, False)
    assert {name: names for name, names in found.items() if names} == {}


def test_every_adapter_is_waited_for(gloo_pool: Any) -> None:
    (found,) = gloo_pool(1).run(all_unwaited, ADAPTED, True)
    assert {name: names for name, names in found.items() if names} == {}
