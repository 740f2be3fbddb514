"""Rows of concatenated documents: Megatron's, with index files that belong to the data as it is now."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset

from mkd.data.sources.indexed import index_fingerprint
from mkd.data.sources.token_files import TokenFile
from mkd.errors import MkdDataError
from mkd.utils.atomic_files import hash_of, naming, publish_files, scratch_folder
from mkd.utils.json_files import read_json

_ARRAYS = ("document_index.npy", "sample_index.npy", "shuffle_index.npy")
_CHECKSUMS, _DESCRIPTION = "checksums.json", "description.txt"
"""Ends of the names of a set's index files. Megatron uses them if the arrays and the description exist; the checksums
of the arrays are mkd's, and absent beside files of older versions."""


class DocumentRows(GPTDataset):
    """Megatron's rows of an indexed data set.

    Megatron stores the order of a set's rows in files whose name is a hash of prefix, shares, seed and sizes. Data that
    is made again under the same prefix would therefore be read by the index of the older data: new documents are never
    read, and shorter ones give rows of too few tokens. Here the documents' lengths, which the index is a function of,
    are part of the name, in blends too. The rows themselves are the same.

    megatron-core 0.19 writes the files in place, so a full disk or a killed job leaves a set that looks complete. Here
    they are written elsewhere and get their names together.
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
        files = [Path(folder, f"{name}-{end}") for end in (*_ARRAYS, _DESCRIPTION)]
        try:
            if not all(map(Path.is_file, files)) and (not dist.is_initialized() or dist.get_rank() == 0):
                return self._build_and_publish(Path(folder, name), files)
            self._compare_checksums(Path(folder, name), files)
            return self._checked(super()._build_document_sample_shuffle_indices(), name, folder)
        except ValueError as error:  # of numpy, for a file that is truncated
            raise MkdDataError(f"{folder}/{name}-* are damaged ({error}): delete these index files") from error
        except OSError as error:
            raise MkdDataError(
                f"the index of the rows of --data-path {self.dataset.path_prefix} cannot be written to, or read from, "
                f"{folder} ({error}): free space there, or give another --data-cache-path"
            ) from error

    def _build_and_publish(self, base: Path, files: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        config = self.config
        with scratch_folder(base) as scratch, naming(base):
            try:
                self.config = copy.copy(config)  # other threads build other sets with it
                self.config.path_to_cache = str(scratch)
                built = super()._build_document_sample_shuffle_indices()
            finally:
                self.config = config
            hashes = json.dumps({file.name: hash_of(scratch / file.name) for file in files[:-1]})
            checksums = Path(f"{base}-{_CHECKSUMS}")
            (scratch / checksums.name).write_text(hashes)
            publish_files({scratch / file.name: file for file in (*files[:-1], checksums, files[-1])})
        return built

    def _compare_checksums(self, base: Path, files: list[Path]) -> None:
        """Raise ValueError if an array is not what was written. Rank 0 does so for all ranks."""
        checksums = Path(f"{base}-{_CHECKSUMS}")
        if not checksums.is_file() or (dist.is_initialized() and dist.get_rank() != 0):
            return
        stored = read_json(checksums)
        for file in files[:-1]:
            if not isinstance(stored, dict) or stored.get(file.name) != hash_of(file):
                raise ValueError(f"the checksum of {file.name} does not match")

    def _checked(
        self, built: tuple[np.ndarray, np.ndarray, np.ndarray], name: str, folder: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The indices, after a check that they are inside their bounds."""
        documents, samples, order = built
        sound = (
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
        if not sound:
            raise MkdDataError(f"{folder}/{name}-* are damaged: delete these index files")
        return built
