"""The layers that adapter_config.json names, compared with PEFT."""

from itertools import product
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from mkd.checkpoint.adapters.lora_targets import LoraTargets
from mkd.errors import MkdCheckpointError

MODULES = [
    *(f"model.layers.{layer}.{name}" for layer, name in product((0, 1, 10), ("self_attn.q_proj", "mlp.down_proj"))),
    *("model.layers.1.mlp.experts.0.down_proj", "model.vision.blocks.1.q_proj", "model.decoder.layers.0.q_proj"),
    *("layers.1.q_proj", "h.1.q_proj", "lm_head", "q_proj", "model.q_proj", "model.mtp.0.h.1.q_proj"),
]
TARGETS = [
    *(["q_proj", "down_proj", "lm_head"], ["model.layers.0.mlp.down_proj", "q_proj"], ["layers.1.q_proj"], []),
    *(["1.q_proj", "model.layers.1.mlp.experts.0.down_proj"], r".*\.(q_proj|lm_head)", ["lm_head"]),
]
NUMBERS = [None, 0, 1, [1, 10], []]
LISTS = [None, "layers", ["layers", "blocks"], ["h"], "", [], "(?:layers|h)", "layers|h", r"decoder\.layers"]
EXCLUDED = [None, ["down_proj", "model.q_proj"], r".*experts.*"]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("targets", TARGETS)
def test_layers_are_those_of_peft(targets: Any, numbers: Any) -> None:
    for lists, excluded in product(LISTS, EXCLUDED):
        config = dict(
            target_modules=targets, layers_to_transform=numbers, layers_pattern=lists, exclude_modules=excluded
        )
        try:
            known = LoraConfig(**config)
        except ValueError:
            with pytest.raises(MkdCheckpointError):
                LoraTargets.read(config, MkdCheckpointError)
            continue
        read = LoraTargets.read(config, MkdCheckpointError)
        expected = {module: bool(check_target_module_exists(known, module)) for module in MODULES}
        assert {module: read.has(module) for module in MODULES} == expected, config
