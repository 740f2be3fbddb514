"""Text files to Megatron's indexed files: PREFIX.bin (token ids), PREFIX.idx (document bounds), PREFIX.json (facts).

The three are written under temporary names and renamed together at the end, PREFIX.idx last, because Megatron treats a
data set without it as missing. A job that is killed leaves nothing that can be mistaken for a data set.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mkd.data.sources.parallel import map_in_order
from mkd.data.sources.text import EncodedBatch, Encoding, check_inputs, encode, eod_id, load_tokenizer, read_batches
from mkd.errors import MkdDataError
from mkd.utils.atomic_files import PARTIAL, publish_files

BYTES_PER_WORKER = 4 << 20
"""Input below which another worker process costs more to start (about 2 s) than it saves."""

Progress = Callable[[int, int, int], None]
"""Called with the documents, tokens and input bytes done so far, at the start and after each batch."""


@dataclass(frozen=True)
class IndexedText:
    """Facts about an indexed data set, stored beside it as PREFIX.json."""

    documents: int
    tokens: int
    max_token_id: int
    """The largest id in the data: a model needs an embedding of more rows than this."""
    vocab_size: int
    """Vocabulary size of the tokenizer, with added tokens."""
    tokenizer_hash: str | None
    """`mkd.checkpoint.hf.folder.tokenizer_hash` of the tokenizer: equal to that of the models that read this data."""
    eod: int | None
    """Id that ends each document; None if none was appended."""
    dtype: str
    """numpy name of the ids in PREFIX.bin."""
    skipped: int
    """Documents and lines left out because they hold nothing but white space."""

    @classmethod
    def load(cls, prefix: str) -> "IndexedText | None":
        """Read PREFIX.json; None if it does not exist, as for data made by another tool.

        Raises MkdDataError if the file is broken or does not describe the PREFIX.bin beside it.
        """
        path = Path(f"{prefix}.json")
        if not path.is_file():
            return None
        try:
            facts = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise MkdDataError(f"{path} is broken ({error}): make the data again with tools/preprocess.py") from None
        binary = Path(f"{prefix}.bin")
        size = binary.stat().st_size if binary.is_file() else 0
        if size != facts.tokens * np.dtype(facts.dtype).itemsize:
            raise MkdDataError(
                f"{path} describes {facts.tokens} tokens of {facts.dtype}, but {binary} has {size} bytes: delete "
                f"{path} if another tool made the data, else make it again with tools/preprocess.py"
            )
        return facts


def dataset_prefix(output_prefix: str, json_key: str) -> str:
    """Name that Megatron's own tool gives a data set, for `--data-path`."""
    return f"{output_prefix}_{json_key}_document"


def default_workers(paths: Sequence[str]) -> int:
    """One process per usable core, fewer for a small input."""
    size = sum(Path(path).stat().st_size for path in paths)
    return max(1, min(len(os.sched_getaffinity(0)), size // BYTES_PER_WORKER))


def write_indexed_text(
    paths: Sequence[str],
    prefix: str,
    encoding: Encoding,
    *,
    workers: int,
    tokenizer_hash: str | None = None,
    split_on: str | None = None,
    progress: Progress | None = None,
) -> IndexedText:
    """Tokenize the documents of `paths`, in order, into PREFIX.bin, PREFIX.idx and PREFIX.json.

    Token ids are stored as uint16 when the vocabulary has fewer than 65500 entries, else as int32, which is what
    Megatron chooses. Raises MkdDataError for invalid input or tokenizer; an existing data set is then kept unchanged.
    """
    check_inputs(paths)
    tokenizer = load_tokenizer(encoding.tokenizer_dir)
    eod = eod_id(tokenizer, encoding.tokenizer_dir) if encoding.append_eod else None
    writer = _Writer(prefix, len(tokenizer))
    if progress is not None:
        progress(0, 0, 0)
    try:
        advice = f"give fewer than --workers {workers}"
        for batch in map_in_order(partial(encode, encoding), read_batches(paths, split_on), workers, advice):
            writer.add(batch)
            if progress is not None:
                progress(writer.documents, writer.tokens, writer.size)
        if writer.documents == 0:
            raise MkdDataError(f"--input {' '.join(paths)}: no document holds more than white space")
        facts = IndexedText(
            documents=writer.documents,
            tokens=writer.tokens,
            max_token_id=writer.max_token_id,
            vocab_size=len(tokenizer),
            tokenizer_hash=tokenizer_hash,
            eod=eod,
            dtype=np.dtype(writer.dtype).name,
            skipped=writer.skipped,
        )
        writer.publish(facts)
    finally:
        writer.remove_partials()
    return facts


class _Writer:
    """The three files under their temporary names, and counts of what was written."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        # Imported here: worker processes import this module too, and importing megatron takes seconds.
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self.binary, self.facts, self.index = (
            Path(f"{prefix}{suffix}{PARTIAL}") for suffix in (".bin", ".json", ".idx")
        )
        self.dtype = DType.optimal_dtype(vocab_size)
        self.builder = IndexedDatasetBuilder(str(self.binary), dtype=self.dtype)
        self.documents = self.tokens = self.max_token_id = self.skipped = self.size = 0

    def add(self, batch: EncodedBatch) -> None:
        start = 0
        for length in batch.lengths:
            self.builder.add_document(batch.tokens[start : start + length], [length])
            start += length
        self.documents += len(batch.lengths)
        self.tokens += batch.tokens.size
        self.max_token_id = max(self.max_token_id, int(batch.tokens.max(initial=0)))
        self.skipped += batch.empty
        self.size += batch.size

    def publish(self, facts: IndexedText) -> None:
        """Rename all files; an older index is removed first, so that it is never paired with newer tokens."""
        self.builder.finalize(str(self.index))
        self.facts.write_text(json.dumps(asdict(facts), indent=1) + "\n")
        self.index.with_suffix("").unlink(missing_ok=True)
        publish_files({path: path.with_suffix("") for path in (self.binary, self.facts, self.index)})

    def remove_partials(self) -> None:
        self.builder.data_file.close()
        for path in (self.binary, self.facts, self.index):
            path.unlink(missing_ok=True)
