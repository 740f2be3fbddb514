"""Training, validation and test set: rows of chat files, packed documents, and blends of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split

from mkd.data.epochs import NAMES, Reading, blend_of
from mkd.data.packing.aligned_layout import AlignedRowLayout
from mkd.data.packing.aligned_streams import AlignedRows
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.streams import BlendOfRows, BlendSchedule, ClassicRows, RowOptions, RowStream, SampleRows
from mkd.data.sources.aligned import AlignedStore, BatchAligner, aligned_base, tokenize_aligned
from mkd.data.sources.chat import ChatTokenizer
from mkd.data.sources.document_rows import DocumentRows
from mkd.data.sources.preview import preview
from mkd.data.sources.stores import ChatStore, DocumentStore, chat_base, is_chat_file, part_of, tokenize_chat
from mkd.data.sources.token_files import TokenFile
from mkd.errors import MkdDataError, MkdError


@dataclass(frozen=True)
class CrossTokenizerRows:
    """Rows with views for teachers that have other tokenizers."""

    encoder: BatchAligner
    options: RowOptions[AlignedRowLayout]
    vocabularies: tuple[int, ...]
    """Vocabulary size of each teacher."""


@dataclass(frozen=True)
class RowSets:
    """Builds the three sets."""

    config: GPTDatasetConfig
    """Megatron's: files, weights, shares and seed."""
    options: RowOptions[RowLayout]
    tokenizer: ChatTokenizer
    """Tokenizer of chat files."""
    true_vocab: int
    """Vocabulary size of the student, without padding; ids from it up are errors."""
    log: Callable[[str], None]
    """Called with each line for the user."""
    cross: CrossTokenizerRows | None = None
    """None if all teachers have the student's tokenizer."""

    def build(self, sizes: Sequence[int | None]) -> list[BlendOfRows | None]:
        """Training, validation and test set of `sizes` rows; None where the size is 0 or there is no data.

        Collective if torch.distributed is initialized: rank 0 fills the data cache, then the others read it.

        Raises:
            MkdDataError: a file cannot be used, or a set has no sample.
        """
        return _first_rank_first(lambda: self._build(sizes))

    def rows_per_epoch(self) -> int:
        """Rows of the training set's files that hold every sample once, over all files. Collective like `build`."""
        return _first_rank_first(self._rows_per_epoch)

    def _rows_per_epoch(self) -> int:
        blend, share = blend_of(self.config, Split.train)
        return sum(
            self._rows_of(name, share)
            if self._is_classic(name)
            else self._samples(name, share, Split.train, 1).per_epoch
            for name in blend[0]
        )

    def _build(self, sizes: Sequence[int | None]) -> list[BlendOfRows | None]:
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._show_chats(sizes)
        return [self._one_set(split, size or 0) for split, size in zip(Split, sizes, strict=True)]

    def _show_chats(self, sizes: Sequence[int | None]) -> None:
        """Show how chat data is read, each name once, and tokenize it."""
        blends = [blend_of(self.config, split) for split, size in zip(Split, sizes, strict=True) if size]
        names = [name for blend, share in blends if blend is not None and share is not None for name in blend[0]]
        for name in filter(is_chat_file, dict.fromkeys(names)):
            for line in preview(name, self.tokenizer):
                self.log(line)
            if self.cross is None:
                facts = self._store(name, (0.0, 1.0)).facts
                self.log(f"{'warning: ' if facts.bad else ''}{name}: {facts}")

    def _one_set(self, split: Split, size: int) -> BlendOfRows | None:
        blend, share = blend_of(self.config, split)
        if size == 0 or blend is None or share is None:
            return None
        names, weights = blend
        makers = [self._documents if self._is_classic(name) else self._samples for name in names]
        if weights is None:
            weights = [float(self._rows_of(name, share)) for name in names] if len(names) > 1 else [1.0]
        schedule = BlendSchedule(weights)
        needed = schedule.needed(size)
        streams = [make(name, share, split, n) for make, name, n in zip(makers, names, needed, strict=True)]
        for name, stream, n in zip(names, streams, needed, strict=True):
            reading = Reading(NAMES[split], name, n, stream.per_epoch)
            self.log(f"{reading.split:10s} {name}: {stream}; {reading}")
            if reading.warning is not None:
                self.log(f"warning: {reading.warning}")
        return BlendOfRows(streams, schedule, size, split)

    def _is_classic(self, name: str) -> bool:
        return not is_chat_file(name) and not self.options.layout.is_packed and self.cross is None

    def _samples(self, name: str, share: tuple[float, float], split: Split, needed: int) -> RowStream:
        store = self._store(name, share)
        if not len(store.lengths):
            raise MkdDataError(
                f"--split {self.config.split} leaves no sample of --data-path {name} for {NAMES[split]}: give it a "
                "larger share or 0, or take a longer file"
            )
        if isinstance(store, AlignedStore):
            return AlignedRows(store, self.cross.options, name)
        return SampleRows(store, self.options, name)

    def _store(self, name: str, share: tuple[float, float]) -> ChatStore | DocumentStore | AlignedStore:
        if self.cross is not None:
            return self._aligned_store(name, share)
        if not is_chat_file(name):
            return DocumentStore(name, share, self.true_vocab)
        base = chat_base(name, self.tokenizer, self.config.path_to_cache)
        if not dist.is_initialized() or dist.get_rank() == 0:
            tokenize_chat(name, self.tokenizer, base, self.log)
        store = ChatStore(base, share, self.true_vocab)
        if store.facts.max_token_id >= self.true_vocab:
            raise MkdDataError(
                f"--data-path {name}: its largest token id is {store.facts.max_token_id}, but the model's vocabulary "
                f"has {self.true_vocab} tokens: {self.tokenizer.flag} {self.tokenizer.folder} is not the model's"
            )
        return store

    def _aligned_store(self, name: str, share: tuple[float, float]) -> AlignedStore:
        encoder = self.cross.encoder
        base = aligned_base(name, encoder, self.config.path_to_cache)
        if not dist.is_initialized() or dist.get_rank() == 0:
            tokenize_aligned(name, encoder, base, self.log, self.true_vocab)
        vocabularies = (self.true_vocab, *self.cross.vocabularies)
        store = AlignedStore(base, share, len(encoder.folders), vocabularies)
        self.log(f"{name}: {store.facts}")
        views = zip(store.facts.max_token_id, vocabularies, encoder.folders, strict=True)
        for largest, vocabulary, folder in views:
            if largest >= vocabulary:
                raise MkdDataError(
                    f"--data-path {name}: with the tokenizer in {folder} its largest token id is {largest}, but that "
                    f"model's vocabulary has {vocabulary} tokens: the tokenizer is not the model's"
                )
        return store

    def _documents(self, prefix: str, share: tuple[float, float], split: Split, needed: int) -> RowStream:
        documents = TokenFile(prefix, self.true_vocab)
        part = part_of(len(documents.sequence_lengths), share)
        numbers = np.arange(part.start, part.stop, dtype=np.int32)
        samples = DocumentRows(documents, prefix, numbers, max(needed, 1), split, self.config)
        return ClassicRows(samples, self._rows_of(prefix, share))

    def _rows_of(self, name: str, share: tuple[float, float]) -> int:
        """Estimated number of rows that hold a file's tokens once."""
        lengths = self._store(name, share).lengths
        tokens = lengths if lengths.ndim == 1 else lengths[:, 0]
        return max(1, int(tokens.sum(dtype=np.int64)) // self.options.layout.row_length)


def _first_rank_first[Result](call: Callable[[], Result]) -> Result:
    """Call on rank 0, which fills the data cache, and then on the other ranks. Collective over all ranks.

    Raises:
        MkdError: on all ranks, if it is raised on rank 0.
    """
    if not dist.is_initialized():
        return call()
    failure: list[MkdError | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = call()
        except MkdError as error:
            failure = [error]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
    return result if dist.get_rank() == 0 else call()
