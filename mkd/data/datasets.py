"""Training, validation and test sets from Megatron's `.bin/.idx` files."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mkd.errors import MkdDataError

# Tokens looked at when nothing beside the data says how large its ids are.
_PROBE_TOKENS = 1 << 22


def check_data(prefixes: Iterable[str], true_vocab: int) -> None:
    """Check files and vocabulary before any weight is loaded.

    Args:
        prefixes: PREFIX of each PREFIX.bin and PREFIX.idx.
        true_vocab: number of tokens that the model knows.

    Raises:
        MkdDataError: a file is missing or empty, or holds ids that the model does not have.
    """
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            file = Path(prefix + suffix)
            if not file.is_file():
                raise MkdDataError(f"--data-path {prefix}: {file} does not exist (tools/preprocess.py makes it)")
            if file.stat().st_size == 0:
                raise MkdDataError(f"--data-path {prefix}: {file} is empty")
        largest = _largest_token(prefix)
        if largest >= true_vocab:
            raise MkdDataError(
                f"--data-path {prefix} has token id {largest}, but the model's vocabulary has {true_vocab} tokens: the "
                "data was made with another tokenizer; run tools/preprocess.py with the model's own"
            )


def _largest_token(prefix: str) -> int:
    """From the file that tools/preprocess.py writes beside the data, else from the first few million tokens."""
    sidecar = Path(prefix + ".json")
    if sidecar.is_file():
        return int(json.loads(sidecar.read_text())["max_token_id"])
    index = IndexedDataset(prefix).index
    tokens = np.memmap(prefix + ".bin", dtype=index.dtype, mode="r")[:_PROBE_TOKENS]
    return int(tokens.max())


def build_datasets(config: GPTDatasetConfig, sizes: tuple[int | None, int | None, int | None]) -> list[Any]:
    """Train, validation and test set, the same on every rank.

    Every rank opens the files itself (memory-mapped), so no batch is ever broadcast; rank 0 builds the index cache
    first.

    Args:
        config: as Megatron's; `mock` gives generated tokens.
        sizes: samples needed of each; None takes one epoch.

    Raises:
        MkdDataError: a split that is asked for has no documents.
    """
    kind = MockGPTDataset if config.mock else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, config).build()


def provider_of(datasets: list[Any]) -> Callable:
    """What `megatron.training.pretrain` asks for datasets.

    Virtual pipeline stages after the first get none: `mkd.schedule` draws each batch once and hands it to all stages.
    """

    def provider(sizes: Any, vp_stage: int | None = None) -> list[Any]:
        return datasets if not vp_stage else [None, None, None]

    provider.is_distributed = True
    return provider
