"""Megatron's arguments about data: the files that are read, and the dataset configuration."""

import math
import re
import traceback
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.utils import get_blend_and_blend_per_split

from mkd.errors import MkdConfigError, MkdDataError

LEAST_SHARE = 1e-9
"""Smallest share of a file in the rows of its blend."""


def data_prefixes(args: Namespace) -> list[str]:
    """Prefixes of all `.bin/.idx` pairs, and all chat files, that the flags name.

    Raises:
        MkdDataError: none is named, or a list of weights and prefixes is invalid.
        MkdConfigError: a weight is not a number above 0, or so small that its file would not be read.
    """
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, ValueError, KeyError, OSError) as error:
        raise MkdDataError(f"--data-path and the like cannot be read ({error!r}): write WEIGHT PREFIX pairs") from error
    parts = [part for part in (blend, *(per_split or ())) if part is not None]
    for names, weights in parts:
        _check_weights(names, weights)
    prefixes = [prefix for names, _ in parts for prefix in names]
    if not prefixes and not args.mock_data:
        alone = getattr(args, "kd_on_policy", None) == 1.0 and args.eval_iters == 0
        raise MkdDataError(
            "no training data: give --data-path PREFIX (PREFIX.bin and PREFIX.idx) or --data-path FILE.jsonl (chats)"
            + (", or, since --kd-on-policy 1 with --eval-iters 0 reads no row of it, --mock-data" if alone else "")
        )
    return prefixes


def _check_weights(names: Sequence[str], weights: Sequence[float] | None) -> None:
    """Refuse weights with which Megatron fails when it builds the datasets, and files that would never be read."""
    total = sum(filter(math.isfinite, weights or ()))
    for name, weight in zip(names, weights or (), strict=False):
        if not (math.isfinite(weight) and weight > 0.0):
            rule = "a weight must be a finite number above 0"
        elif weight < LEAST_SHARE * total:
            rule = f"its share is below {LEAST_SHARE:g}, so that it would not be read"
        else:
            continue
        raise MkdConfigError(
            f"{name} has the weight {weight:g} in its blend; {rule}: correct it, or leave the file out"
        )


def training_prefixes(args: Namespace) -> list[str]:
    """The prefixes and chat files in the order in which the training set blends them; `data_prefixes` has passed."""
    blend, per_split = get_blend_and_blend_per_split(args)
    training = blend if per_split is None else per_split[0]
    return [] if training is None else list(training[0])


def _check_split(split: str | None) -> None:
    """Megatron uses the digits and dots that it finds: 9e1 is 9 and 1, -1 is 1, and nan is nothing."""
    if split is not None and not re.fullmatch(r"[\s\d.,/]*\d[\s\d.,/]*", split):
        raise MkdConfigError(f"--split is {split}: give the shares of training, validation and test data, as in 98,1,1")


def dataset_config(args: Namespace, tokenizer: Any) -> GPTDatasetConfig:
    """The dataset configuration of Megatron's flags.

    Raises:
        MkdConfigError: they contradict each other.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    options = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    _check_split(args.split)
    try:
        return GPTDatasetConfig(**options)
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise MkdConfigError(f"megatron refuses the data flags (--split {args.split}): {reason}") from error
