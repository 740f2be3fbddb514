"""Rows of concatenated documents: Megatron's, with index files that belong to the data as it is now."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from mkd.data.sources.index_files import IndexFiles
from mkd.data.sources.indexed import index_fingerprint
from mkd.data.sources.token_files import TokenFile
from mkd.errors import MkdDataError

_BLOCK = 1 << 20
"""Rows of a blend that are checked at once."""


class DocumentRows(GPTDataset):
    """Megatron's rows of an indexed data set.

    Megatron stores the order of a set's rows in files whose name is a hash of prefix, shares, seed and sizes. Data that
    is made again under the same prefix would therefore be read by the index of the older data: new documents are never
    read, and shorter ones give rows of too few tokens. Here the documents' lengths, which the index is a function of,
    are part of the name, in blends too. The rows themselves are the same. See `IndexFiles` for the files.
    """

    def __init__(self, indexed_dataset: Any, dataset_path: str, *args: Any) -> None:
        """Build or read the index files. `dataset_path` serves Megatron only as a part of their name from here on."""
        super().__init__(indexed_dataset, f"{dataset_path} {index_fingerprint(dataset_path)}", *args)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> TokenFile:
        """Called by megatron to open PREFIX.bin and PREFIX.idx; `config.true_vocab`, if set, limits the ids."""
        return TokenFile(dataset_path, getattr(config, "true_vocab", None))

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Megatron's method that reads the index files, or builds and writes them.

        Raises:
            MkdDataError: the files cannot be written, or are damaged.
        """
        folder = self.config.path_to_cache or f"{self.dataset.path_prefix}/cache/{type(self).__name__}_indices"
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        files = IndexFiles(folder, name, ("document_index.npy", "sample_index.npy", "shuffle_index.npy"))
        read = super()._build_document_sample_shuffle_indices
        return _built_or_read(self, files, read, self._are_sound, f"--data-path {self.dataset.path_prefix}")

    def _are_sound(self, built: tuple[np.ndarray, np.ndarray, np.ndarray]) -> bool:
        """True if the indices are inside their bounds."""
        documents, samples, order = built
        return bool(
            samples.ndim == 2
            and len(documents) > 0
            and len(order) <= len(samples) - 1
            and self.indices.min() <= documents.min()
            and documents.max() <= self.indices.max()
            and samples[:, 0].min() >= 0
            and samples[:, 0].max() < len(documents)
            and (np.diff(samples[:, 0]) >= 0).all()
            and order.min(initial=0) >= 0
            and order.max(initial=0) < len(samples) - 1
        )


class BlendedRows(BlendedDataset):
    """Megatron's blend of several sets of rows, whose index files are checked; see `IndexFiles`."""

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Megatron's method that reads the index files, or builds and writes them.

        Raises:
            MkdDataError: the files cannot be written, or are damaged.
        """
        read = super()._build_indices
        if not self.config.path_to_cache:  # each rank builds them in memory
            return read()
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
        files = IndexFiles(self.config.path_to_cache, name, ("dataset_index.npy", "dataset_sample_index.npy"))
        return _built_or_read(self, files, read, self._are_sound, "a blend in --data-path")

    def _are_sound(self, built: tuple[np.ndarray, np.ndarray]) -> bool:
        """True if every entry is a row of one of the sets."""
        sets, rows = built
        sizes = np.array([len(one) for one in self.datasets])
        wanted = sum(self.weights) if self.size is None else self.size
        if not sets.shape == rows.shape == (wanted,):
            return False
        for first in range(0, len(sets), _BLOCK):
            which, row = sets[first : first + _BLOCK], rows[first : first + _BLOCK]
            if which.min() < 0 or which.max() >= len(sizes) or row.min() < 0 or (row >= sizes[which]).any():
                return False
        return True


class RowsBuilder(BlendedMegatronDatasetBuilder):
    """Megatron's builder of training, validation and test set, with `BlendedRows`."""

    @staticmethod
    def build_generic_dataset(kind: Any, *args: Any) -> Any:
        """Called by megatron for each set and each blend of sets."""
        kind = BlendedRows if kind is BlendedDataset else kind
        return BlendedMegatronDatasetBuilder.build_generic_dataset(kind, *args)


def _built_or_read[Built: tuple[np.ndarray, ...]](
    dataset: Any, files: IndexFiles, read: Callable[[], Built], is_sound: Callable[[Built], bool], what: str
) -> Built:
    """The indices of a data set.

    Args:
        dataset: Megatron's.
        files: its index files.
        read: Megatron's method, which reads the files in `dataset.config.path_to_cache`, or builds and writes them.
        is_sound: check of indices that were read.
        what: the data, for messages.

    Raises:
        MkdDataError: the files cannot be written, or are damaged.
    """

    def build(folder: str) -> Built:
        config = dataset.config
        try:
            dataset.config = copy.copy(config)  # other threads build other sets with it
            dataset.config.path_to_cache = folder
            return read()
        finally:
            dataset.config = config

    try:
        if files.are_missing:
            return files.publish(build)
        files.check()
        found = read()
    except ValueError as error:  # also numpy's, for a file that is truncated
        raise MkdDataError(f"{files.base}-* are damaged ({error}): delete these index files") from error
    except OSError as error:
        raise MkdDataError(
            f"the index of the rows of {what} cannot be written to, or read from, {files.base.parent} ({error}): free "
            "space there, or give another --data-cache-path"
        ) from error
    if not is_sound(found):
        raise MkdDataError(f"{files.base}-* are damaged: delete these index files")
    return found
