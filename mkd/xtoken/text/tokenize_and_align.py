"""Tokenization and alignment of data for the student and teachers with other tokenizers, in worker processes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from transformers import PreTrainedTokenizerBase

from mkd.data.sources.aligned import AlignedBatch, AlignedSample, DocumentBatch, TeacherText
from mkd.data.sources.chat import EMPTY, UNSUPERVISED
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.record_forms import AS_FOUND, RecordOptions
from mkd.data.sources.text import RawBatch, once_per_process
from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import NO_CHUNK
from mkd.xtoken.text.samples import AlignedPair, Passage, align_sample
from mkd.xtoken.text.tokens import Role, SpanTokenizer

EMPTY_DOCUMENT = "without text"
TOO_SHORT = "with fewer than two tokens"
UNALIGNED = "without a chunk of text that is aligned"
NOT_FOUND = "answers that are not found in the output of the chat templates"
"""Reasons for leaving out samples and messages."""


@dataclass(frozen=True)
class TextAligner:
    """Tokenizes chats and documents with all tokenizers and aligns them: a `mkd.data.sources.aligned.BatchAligner`."""

    folders: tuple[str, ...]
    """Folders of Hugging Face tokenizers, the student's first."""
    flags: tuple[str, ...]
    """Flag that named each folder."""
    all_messages: bool = False
    """Align messages of all roles, not only the assistant's."""
    special_pairs: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each teacher the ids (student's, teacher's) of the special tokens that the loss treats as equal; other pairs
    of special tokens at the same position of a text are in no chunk. Empty: all pairs of special tokens are chunks."""
    options: RecordOptions = AS_FOUND
    """Options of reading conversations."""

    def __post_init__(self) -> None:
        """Raises MkdDataError for a folder without a usable tokenizer."""
        _ = self.fingerprint

    @property
    def tokenizers(self) -> list[SpanTokenizer]:
        return [once_per_process(SpanTokenizer, *named) for named in zip(self.folders, self.flags, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever a token or an alignment may change."""
        parts = [[t.hash, t.tokenizer.chat_template, t.adds_bos] for t in self.tokenizers]
        whole = [parts, self.all_messages, self.special_pairs, *self.options.key]
        return blake2b(json.dumps(whole).encode(), digest_size=16).hexdigest()

    def __call__(self, batch: RawBatch | DocumentBatch) -> AlignedBatch:
        """See `mkd.data.sources.aligned.BatchAligner`."""
        coded = AlignedBatch(size=batch.size)
        if isinstance(batch, DocumentBatch):
            for ids in batch.documents:
                self._add_document(coded, ids)
            return coded
        for where, line in batch.located():
            if not line.strip():
                continue
            try:
                self._add_chat(coded, Conversation.parse(line, where, self.options))
            except MkdDataError as error:
                if not self.options.skips_bad:
                    raise self.options.unskipped(error) from error
                coded.bad.add(error)
        return coded

    def _add_chat(self, coded: AlignedBatch, chat: Conversation) -> None:
        if chat.has_empty_message:
            coded.skipped[EMPTY] += 1
        elif not chat.has_answer:
            coded.skipped[UNSUPERVISED] += 1
        else:
            if chat.fractions:
                raise MkdDataError(
                    f"{chat.where}: a message has the weight {min(chat.fractions):g}; with --kd-xtoken-loss a message "
                    "is learned (1) or not (0): a text chunk of both tokenizers has one weight"
                )
            self._add(coded, self._aligned(chat), UNSUPERVISED)

    def _add_document(self, coded: AlignedBatch, ids: np.ndarray) -> None:
        """Decode a document to text, and align that."""
        student = self.tokenizers[0]
        if len(ids) and ids.max() >= student.size:
            raise MkdDataError(
                f"a document has token id {ids.max()}, but the tokenizer in {self.folders[0]} has {student.size} "
                "tokens: the data was made with another tokenizer"
            )
        passages = list(_passages(ids, student.tokenizer))
        if not any(passage.text.strip() for passage in passages):
            coded.skipped[EMPTY_DOCUMENT] += 1
            return
        samples = self._aligned(passages)
        special = np.isin(student.role_of_id[samples[0].student_ids], (Role.PAD, Role.OTHER))
        coded.changed += not np.array_equal(samples[0].student_ids, ids)
        coded.spelled_out += any((special & (s.alignment.student_chunk == NO_CHUNK)).any() for s in samples)
        self._add(coded, samples, TOO_SHORT)

    def _aligned(self, sample: Sequence[Passage] | Conversation) -> list[AlignedPair]:
        student, *teachers = self.tokenizers
        samples = [align_sample(student, teacher, sample, all_messages=self.all_messages) for teacher in teachers]
        if not self.special_pairs:
            return samples
        special = ~np.isin(student.role_of_id[samples[0].student_ids], (Role.CONTENT, Role.UNK))
        return [found.only_pairs(special, known) for found, known in zip(samples, self.special_pairs, strict=True)]

    def _add(self, coded: AlignedBatch, samples: Sequence[AlignedPair], without_target: str) -> None:
        first = samples[0]
        coded.skipped[NOT_FOUND] += max(sample.not_found for sample in samples)
        if not first.student_targets.any():
            coded.skipped[without_target] += 1
        elif any(sample.alignment.count == 0 for sample in samples):
            coded.skipped[UNALIGNED] += 1
        else:
            views = tuple(
                TeacherText(s.teacher_ids, s.teacher_targets, s.alignment.teacher_chunk, s.alignment.student_chunk)
                for s in samples
            )
            coded.samples.append(AlignedSample(first.student_ids, first.student_targets, views))


def _passages(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[Passage]:
    """The texts of a document, cut at the student's BOS and EOS tokens, which each model replaces by its own.

    Other tools put a BOS before a document, and both between texts that they join.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins, ends = ids == bos, ids == eos
    if bos == eos:  # a token at the beginning is a BOS
        begins[1:] = False
        ends[:1] = False
    for part in np.split(np.arange(len(ids)), np.union1d(np.flatnonzero(begins), np.flatnonzero(ends) + 1)):
        if len(part):
            text = ids[part[~begins[part] & ~ends[part]]]
            yield Passage(
                tokenizer.decode(text, skip_special_tokens=False, clean_up_tokenization_spaces=False),
                bool(begins[part[0]]),
                bool(ends[part[-1]]),
            )
