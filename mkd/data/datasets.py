"""The training, validation and test set of a job."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from mkd.data.packing.row_sets import RowSets
from mkd.data.sources.document_rows import DocumentRows, RowsBuilder

# Evaluations that the validation set is long enough for.
_EVALUATIONS = 1_000_000


class SameSamples(Dataset):
    """The first `period` samples of a set, repeated, so that every evaluation reads the same texts.

    Megatron's evaluations continue where the last one stopped, so their values differ by the texts, and an evaluation
    beyond those that the set was sized for runs out of samples.
    """

    def __init__(self, samples: Any, period: int) -> None:
        """Wrap a set of at least `period` samples; megatron takes the batch size from its `split`."""
        assert len(samples) >= period, f"{len(samples)} samples, {period} required"
        self._samples, self._period = samples, period
        self.split = getattr(samples, "split", Split.valid)

    def __len__(self) -> int:
        return self._period * _EVALUATIONS

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % self._period]


def build_datasets(
    config: GPTDatasetConfig,
    sizes: Sequence[int | None],
    evaluated: int,
    rows: RowSets | None = None,
    true_vocab: int | None = None,
) -> list[Any]:
    """Train, validation and test set, the same on every rank.

    Every rank opens the files itself (memory-mapped), so no batch is broadcast; rank 0 builds the index cache first.

    Args:
        config: Megatron's; with `mock` tokens are generated.
        sizes: samples of each set that the whole run reads.
        evaluated: samples per evaluation. Every evaluation on the validation set reads the same ones.
        rows: rows of chat files, packing and blends; None for Megatron's own concatenation of documents.
        true_vocab: ids of documents from here up are errors when they are read; None disables the check.
    """
    config.true_vocab = true_vocab  # read by `DocumentRows`
    sizes = [sizes[0], evaluated, sizes[2]]
    if rows is not None:
        train, valid, test = rows.build(sizes)
    else:
        kind = MockGPTDataset if config.mock else DocumentRows
        train, valid, test = RowsBuilder(kind, sizes, lambda: True, config).build()
    return [train, SameSamples(valid, evaluated) if valid is not None and evaluated > 0 else None, test]


def provider_of(datasets: list[Any]) -> Callable:
    """The dataset provider that `megatron.training.pretrain` calls.

    Virtual pipeline stages after the first get no datasets: `mkd.train.schedule` reads each batch once for all stages.
    """

    def provider(sizes: Any, vp_stage: int | None = None) -> list[Any]:
        return datasets if not vp_stage else [None, None, None]

    provider.is_distributed = True
    return provider
