"""Megatron's pretraining without mkd's step, schedule or metrics: what a run with --kd-ratio 0 must equal.

The forward step is the one that Megatron-LM's own pretraining script has, in per-token mode.
"""

# ruff: noqa: E402 - the CPU backend must be in place before megatron is imported

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mkd import cpu
from mkd.compat.startup import use_prebuilt_dataset_helpers

if cpu.wanted():
    cpu.activate()
use_prebuilt_dataset_helpers()

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

from mkd.config.megatron.data_args import dataset_config
from mkd.cpu.flags import VALUES


def datasets(sizes: list[int], vp_stage: int | None = None) -> list[GPTDataset]:
    return BlendedMegatronDatasetBuilder(
        GPTDataset, sizes, lambda: True, dataset_config(get_args(), get_tokenizer())
    ).build()


datasets.is_distributed = True


def forward_step(samples: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    sample = next(samples)
    mask = sample["loss_mask"].float()

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (losses.float() * mask).sum()
        count = mask.sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    return model(sample["tokens"], sample["position_ids"], None, labels=sample["labels"]), loss


def main() -> None:
    args = parse_and_validate_args(args_defaults={**VALUES, "calculate_per_token_loss": True})
    for name, value in VALUES.items():
        setattr(args, name, value)
    args.calculate_per_token_loss = True
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
