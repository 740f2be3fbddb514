"""Teachers with other tokenizers in a job: alignment, projections, rows of their own length."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mkd.checkpoint.source import (
    ModelSource,
    PositionLimit,
    fewest_positions,
)
from mkd.config.kd_config import KDConfig
from mkd.config.megatron import data_args
from mkd.config.megatron.layouts import row_multiple
from mkd.data.byte_lengths import byte_lengths
from mkd.data.packing.aligned_layout import AlignedRowLayout
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_sets import CrossTokenizerRows
from mkd.data.packing.streams import RowOptions
from mkd.data.sources.aligned import probe_aligned
from mkd.data.sources.prompts import Prompt, has_conversations
from mkd.data.sources.record_forms import RecordOptions
from mkd.data.sources.stores import chat_files, is_chat_file
from mkd.distributed.groups import Groups
from mkd.errors import MkdConfigError, MkdDataError
from mkd.rollout.rows import WrittenViews
from mkd.train.cross_tokenizer import CrossTokenizer
from mkd.utils.logging import logger
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag
from mkd.xtoken.text.conversations import ends_of_turn
from mkd.xtoken.text.tokenize_and_align import TextAligner
from mkd.xtoken.text.tokens import Role, SpanTokenizer
from mkd.xtoken.text.written import TeacherPrompt, TokenSpeller, WrittenAligner, WrittenView, names_of, separator_of
from mkd.xtoken.vocabulary.build import projection_for
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary
from mkd.xtoken.vocabulary.projection import Projection, ProjectionOptions

_MARGIN = 1.05
"""Length of the teacher's row relative to the need of the first texts: tokens per text vary."""


@dataclass(frozen=True)
class CrossTokenizers:
    """Alignment and projections of all teachers with other tokenizers, in their order."""

    args: Namespace
    """Megatron's, of the job."""
    kd: KDConfig
    sources: tuple[ModelSource, ...]
    encoder: TextAligner
    projections: tuple[Projection, ...]
    row_lengths: tuple[int, ...]
    """Tokens of a row of each teacher."""
    true_vocab: int
    """Vocabulary size of the student."""

    @classmethod
    def of(cls, sources: Sequence[ModelSource], args: Namespace, kd: KDConfig, true_vocab: int) -> "CrossTokenizers":
        """Read the tokenizers and the first texts of the data, and build or read the projections.

        Raises:
            MkdError: a tokenizer, a projection, the data or a length cannot be used.
        """
        _check(sources, args, kd)
        folders = (args.tokenizer_model, *(str(source.tokenizer_folder) for source in sources))
        flags = (tokenizer_flag(args), *(source.origin.split()[0] for source in sources))
        options = RecordOptions.of(kd.data_format, kd.bad_records)
        encoder = TextAligner(folders, flags, all_messages=kd.mask == "all", options=options)
        tokens = [0] * len(folders)
        for name in data_args.data_prefixes(args):
            tokens = [a + b for a, b in zip(tokens, probe_aligned(name, encoder), strict=True)]
        lengths = tuple(
            kd.teacher_seq_length or _row_length(args, kd, tokens[number] / max(1, tokens[0]), source)
            for number, source in enumerate(sources, start=1)
        )
        for length in lengths:
            _check_row_length(length, args, kd)
        projections = _projections(encoder.tokenizers, args, kd)
        if kd.xtoken_loss != "partition_kl":  # the others compare a chunk's tokens as the projection sees them
            encoder = replace(encoder, special_pairs=_special_pairs(encoder.tokenizers[0], projections))
        return cls(args, kd, tuple(sources), encoder, tuple(projections), lengths, true_vocab)

    def own_tokens(self, source: ModelSource) -> tuple[int, int] | None:
        """Size of the vocabulary and of a row of one of these teachers; None for one that shares the tokenizer."""
        view = self.view_of(source)
        return None if view is None else (source.vocab_size, self.row_lengths[view])

    def view_of(self, source: ModelSource) -> int | None:
        """Index in `KDBatch.teacher_views` of a teacher's tokens; None if it reads the student's."""
        return next((number for number, own in enumerate(self.sources) if own is source), None)

    def rows(self, longest: PositionLimit | None) -> CrossTokenizerRows:
        """Options of the rows.

        Args:
            longest: fewest positions of the models that read the student's rows, if they are packed.
        """
        layout = self._layout(longest, kd_everywhere=self.kd.mask == "all")
        options = RowOptions(layout, self.kd.long_samples == "drop", self.args.seed)
        return CrossTokenizerRows(self.encoder, options, tuple(source.vocab_size for source in self.sources))

    def _layout(self, longest: PositionLimit | None, kd_everywhere: bool) -> AlignedRowLayout:
        kd, is_packed = self.kd, self.kd.packing != "none"
        limits = [longest, *(fewest_positions([source]) if is_packed else None for source in self.sources)]
        student, *teachers = (
            row_layout(length, kd, limit if is_packed else None, kd_everywhere=kd_everywhere)
            for length, limit in zip((self.args.seq_length, *self.row_lengths), limits, strict=True)
        )
        return AlignedRowLayout(student, tuple(teachers))

    def written_views(self, prompts: Sequence[Prompt]) -> WrittenViews:
        """The views of texts that the student writes after these prompts.

        Raises:
            MkdDataError: a teacher's chat template refuses a prompt, or its tokens are too many.
        """
        student, *teachers = self.encoder.tokenizers
        layout, speller = self._layout(None, kd_everywhere=False), TokenSpeller.of(student)
        views = []
        for teacher, pairs, rows in zip(
            teachers, _special_pairs(student, self.projections), layout.teachers, strict=True
        ):
            texts = tuple(TeacherPrompt.of(prompt, teacher) for prompt in prompts)
            names, chat_names = _names(student, teacher, dict(pairs))
            kept = None if self.kd.xtoken_loss == "partition_kl" else pairs
            views.append(WrittenView(teacher, texts, names, chat_names, kept, rows.piece_length + 1))
            views[-1].check(prompts)
        return WrittenViews(WrittenAligner(speller, separator_of(student, speller), tuple(views)), layout)

    def warn_of_ends(self, ends: frozenset[int]) -> None:
        """Warn of a teacher that has none of the tokens with which the student ends the texts that it writes."""
        student, *teachers = self.encoder.tokenizers
        for teacher, pairs in zip(teachers, _special_pairs(student, self.projections), strict=True):
            texts, chats = _names(student, teacher, dict(pairs))
            known = {**texts, **chats}.keys() if self.kd.xtoken_loss == "partition_kl" else dict(pairs).keys()
            if not ends & known:
                listed = " ".join(map(str, student.tokenizer.convert_ids_to_tokens(sorted(ends))))
                logger.warning(
                    f"{teacher.flag} {teacher.name} has no token like {listed}, with which the student ends its texts: "
                    "it does not learn from this teacher where to end them (mkd build-projection --pair and "
                    "--kd-projection make it one)"
                )

    def vocabulary(self, view: int, groups: Groups) -> CrossVocabulary:
        """The vocabulary that a teacher shares with the student, on this rank."""
        projection, size = self.projections[view], groups.tp.size()
        return CrossVocabulary.of(
            self.kd.xtoken_loss,
            projection.ids.long(),
            projection.weights,
            projection.common,
            student_vocab=self.true_vocab,
            teacher_vocab=self.sources[view].vocab_size,
            student_width=self.args.padded_vocab_size // size,
            rank=groups.tp.rank(),
            size=size,
            device=torch.device("cuda"),
        )

    def settings(self, groups: Groups) -> tuple[CrossTokenizer, ...]:
        """Contexts of the loss on this rank; empty except on the last pipeline stage."""
        if not groups.is_last_stage:
            return ()
        _, *tokenizers = self.encoder.tokenizers
        found = []
        for view, tokenizer in enumerate(tokenizers):
            lengths = byte_lengths(tokenizer.tokenizer)
            found.append(CrossTokenizer(self.vocabulary(view, groups), None if lengths is None else lengths.to("cuda")))
        return tuple(found)

    def require_bytes(self) -> None:
        """Raise MkdConfigError unless the bytes of every tokenizer's tokens are known."""
        for folder, tokenizer in zip(self.encoder.folders, self.encoder.tokenizers, strict=True):
            if byte_lengths(tokenizer.tokenizer) is None:
                raise MkdConfigError(
                    "--kd-teachers-mode is select, which compares teachers with different tokenizers by nats per byte, "
                    f"but the bytes of a token are unknown for the tokenizer of {folder}: give sum"
                )

    def __str__(self) -> str:
        parts = []
        for source, projection, length in zip(self.sources, self.projections, self.row_lengths, strict=True):
            counts = projection.summary()
            parts.append(
                f"{source.origin}: {self.kd.xtoken_loss}, {counts['exact']} of {counts['student tokens']} student "
                f"tokens in its vocabulary of {source.vocab_size}, rows of {length} tokens"
            )
        return "; ".join(parts)


def _projections(tokenizers: Sequence[SpanTokenizer], args: Namespace, kd: KDConfig) -> list[Projection]:
    """Projection from the student's tokenizer, which is the first, to the tokenizer of each teacher."""
    student, *teachers = tokenizers
    if kd.projection is not None:
        return [Projection.load(kd.projection, student.hash, teachers[0].hash)]
    has_chats = any(map(is_chat_file, data_args.data_prefixes(args)))
    has_chats = has_chats or (kd.prompts is not None and has_conversations(kd.prompts))
    found = []
    for teacher in teachers:
        options = ProjectionOptions(pairs=ends_of_turn(student, teacher) if has_chats else ())
        found.append(projection_for(student, teacher, options, _cache(args), print))
    return found


def _special_pairs(
    student: SpanTokenizer, projections: Sequence[Projection]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Ids of the special tokens that the student and each teacher have in common."""
    pairs = [projection.common.tolist() for projection in projections]
    return tuple(tuple((a, b) for a, b in known if student.role_of_id[a] != Role.CONTENT) for known in pairs)


def _names(
    student: SpanTokenizer, teacher: SpanTokenizer, pairs: dict[int, int]
) -> tuple[dict[int, str], dict[int, str]]:
    """`WrittenView.names` and `chat_names`: pairs of the projection, and the tokens that end a text or an answer."""
    ends = student.tokenizer.eos_token_id, teacher.tokenizer.eos_token_id
    texts = {} if None in ends else {ends[0]: ends[1]}
    chats = {
        student.tokenizer.convert_tokens_to_ids(ours): teacher.tokenizer.convert_tokens_to_ids(theirs)
        for ours, theirs in ends_of_turn(student, teacher)
    }
    return names_of(teacher, {**texts, **pairs}), names_of(teacher, {**chats, **pairs})


def row_layout(length: int, kd: KDConfig, limit: PositionLimit | None, *, kd_everywhere: bool) -> RowLayout:
    """Layout of rows of `length` tokens.

    Args:
        length: tokens of a row.
        kd: the flags.
        limit: the model with the fewest positions that reads the rows; None if unlimited.
        kd_everywhere: see `RowLayout`.
    """
    layout = RowLayout(length, kd.packing_multiple, kd.packing != "none", kd_everywhere)
    if limit is None or not layout.is_packed:
        return layout
    return replace(layout, longest=limit.positions, longest_of=limit.model)


def _check(sources: Sequence[ModelSource], args: Namespace, kd: KDConfig) -> None:
    if args.tokenizer_type != "HuggingFaceTokenizer":
        raise MkdConfigError(
            f"--tokenizer-type is {args.tokenizer_type}, but a teacher with another tokenizer needs a "
            "HuggingFaceTokenizer of the student"
        )
    if args.mock_data:
        raise MkdConfigError("--mock-data has no text, which a teacher with another tokenizer needs: leave it out")
    if kd.top_k is not None:
        raise MkdConfigError(
            f"--kd-top-k is {kd.top_k}, but {sources[0].origin} has another tokenizer, whose tokens "
            "--kd-xtoken-loss selects: leave it out"
        )
    if kd.projection is not None and len(sources) > 1:
        raise MkdConfigError(
            f"--kd-projection is {kd.projection}, but {len(sources)} teachers have other tokenizers: leave it out, the "
            "projections are built when the job starts"
        )
    for source in sources:
        if source.vocab_size is None or source.tokenizer_folder is None:
            raise MkdConfigError(
                f"{source.origin} does not hold its vocabulary size or tokenizer: give its Hugging Face folder, or for "
                "a service --kd-teacher-tokenizer"
            )


def _cache(args: Namespace) -> Path:
    """The data cache; by default the folder that Megatron makes beside the data."""
    if args.data_cache_path is not None:
        return Path(args.data_cache_path)
    name = data_args.data_prefixes(args)[0]
    return Path(chat_files(name)[0] if is_chat_file(name) else name).resolve().parent / "cache"


def _row_length(args: Namespace, kd: KDConfig, ratio: float, source: ModelSource) -> int:
    """Tokens of a teacher's row, from those that it makes of one of the student's.

    A multiple of what --seq-length is a multiple of, up to 256, so that the same layouts can cut it.
    """
    if not ratio:
        raise MkdDataError(
            "the first texts of --data-path cannot be aligned, so the row length of the teacher is unknown: give "
            "--kd-teacher-seq-length"
        )
    unit = math.gcd(args.seq_length, 256)
    if kd.packing != "none":
        unit = math.lcm(unit, kd.packing_multiple)
    length = unit * math.ceil(args.seq_length * ratio * _MARGIN / unit)
    most = source.architecture.get("max_position_embeddings")
    return length if most is None else max(unit, min(length, most // unit * unit))


def _check_row_length(length: int, args: Namespace, kd: KDConfig) -> None:
    multiple = row_multiple(args, kd)
    if kd.packing != "none":
        multiple = math.lcm(multiple, kd.packing_multiple)
    if length % multiple:
        raise MkdConfigError(
            f"--kd-teacher-seq-length is {length}, not a multiple of {multiple}, which --kd-packing-multiple or the "
            f"parallel layout need: give {-(-length // multiple) * multiple}"
        )
