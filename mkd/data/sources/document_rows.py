"""Rows of concatenated documents: Megatron's, with index files that belong to the data as it is now."""

from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDataset

from mkd.data.sources.indexed import index_fingerprint


class DocumentRows(GPTDataset):
    """Megatron's rows of an indexed data set.

    Megatron stores the order of a set's rows in files whose name is a hash of prefix, shares, seed and sizes. Data that
    is made again under the same prefix would therefore be read by the index of the older data: new documents are never
    read, and shorter ones give rows of too few tokens. Here the documents' lengths, which the index is a function of,
    are part of the name, in blends too. The rows themselves are the same.
    """

    def __init__(self, indexed_dataset: Any, dataset_path: str, *args: Any) -> None:
        """Build or read the index files. `dataset_path` serves Megatron only as a part of their name from here on."""
        super().__init__(indexed_dataset, f"{dataset_path} {index_fingerprint(dataset_path)}", *args)
