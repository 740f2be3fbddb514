"""Preview of a job's data: the first tokens of a few samples, their targets, and how full the rows are."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mkd.config.kd_config import KDConfig
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_plan import Pieces, cut, one_per_row, pack
from mkd.data.sources.chat import SUPERVISED, ChatTokenizer
from mkd.data.sources.preview import BEGIN, END
from mkd.data.sources.record_forms import AS_FOUND, RecordOptions
from mkd.data.sources.stores import DocumentStore, first_records, is_chat_file
from mkd.errors import visible
from mkd.job.cross_tokenizer import row_layout
from mkd.job.job import Job
from mkd.utils.model_folders.pretrained import load_tokenizer
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag

TARGET, CONTEXT = "green", "dim"
"""Styles of targets and of other tokens."""
FIRST_BYTES = 1 << 18
"""Bytes of a chat file from which samples are read."""
FIRST_SAMPLES = 512
"""Samples whose lengths show how full the rows are."""
SHOWN_ROWS = 3

Sample = tuple[np.ndarray, np.ndarray]
"""Token ids [n], and [n] bool: True for targets."""


def first_samples(
    name: str, tokenizer_folder: str | None, options: RecordOptions = AS_FOUND, flag: str = "--tokenizer-model"
) -> list[Sample]:
    """The first samples of a PREFIX.bin or of chat data.

    Args:
        name: PREFIX, or chat data.
        tokenizer_folder: tokenizer of chat data; None without any.
        options: options of reading chat data.
        flag: the flag that named the tokenizer's folder, for messages.

    Raises:
        MkdDataError: a record is not a conversation.
    """
    if not is_chat_file(name):
        store = DocumentStore(name, (0.0, 1.0))
        some = [store.read(i, 0, int(store.lengths[i])) for i in range(min(FIRST_SAMPLES, len(store.lengths)))]
        return [(ids.copy(), targets) for ids, targets in some]  # the originals are views of the store, which is closed
    coded = ChatTokenizer(tokenizer_folder, options, flag)(first_records(name, FIRST_BYTES))
    parts = np.split(coded.tokens, np.cumsum(coded.lengths)[:-1]) if coded.lengths else []
    return [((part & ~SUPERVISED).astype(np.int64), (part & SUPERVISED) != 0) for part in parts]


def painted(sample: Sample, tokenizer: PreTrainedTokenizerBase | None, most: int) -> Text:
    """A sample's first tokens as text, targets between signs and in another color; as ids without a tokenizer."""
    ids, targets = (part[:most] for part in sample)
    text = Text()
    for is_target, group in groupby(range(len(ids)), key=lambda place: bool(targets[place])):
        some = [int(ids[place]) for place in group]
        words = " ".join(map(str, some)) if tokenizer is None else tokenizer.decode(some)
        words = f"{BEGIN}{words}{END}" if is_target else words
        text.append(visible(words) + ("" if tokenizer else " "), style=TARGET if is_target else CONTEXT)
    if len(sample[0]) > most:
        text.append(f" ... ({len(sample[0])} tokens)", style=CONTEXT)
    return text


def rows_of(samples: Sequence[Sample], job: Job) -> list[str]:
    """The first rows made of these samples, and the share of tokens in all of them."""
    kd, length = job.kd, job.args.seq_length
    layout = row_layout(length, kd, job.data.position_limit, kd_everywhere=False)
    pieces = _pieces(samples, layout, kd)
    if not len(pieces):
        return []
    is_packed = layout.is_packed
    plan = pack(pieces.positions, length, kd.packing_multiple, job.args.seed) if is_packed else None
    plan = plan or one_per_row(pieces.positions, length)
    lines = []
    for row in range(min(SHOWN_ROWS, len(plan))):
        positions = pieces.positions[plan.row(row)]
        lines.append(f"row {row}: {' + '.join(map(str, positions))} of {length} positions")
    how = "packed" if is_packed else "one per row"
    return [*lines, f"{len(samples)} samples {how}: {len(plan)} rows, {plan.efficiency:.1%} of them tokens"]


def too_long(name: str, samples: Sequence[Sample], job: Job) -> str | None:
    """A sentence on samples that have more tokens than a model has positions; None if there are none.

    Args:
        name: name of the data in --data-path.
        samples: its first samples.
        job: the job.
    """
    layout = row_layout(job.args.seq_length, job.kd, job.data.position_limit, kd_everywhere=False)
    pieces = _pieces(samples, layout, job.kd)
    if not layout.is_limited or not pieces.split + pieces.dropped:
        return None
    return (
        f"{name}: {pieces.split + pieces.dropped} of the first {len(samples)} samples are longer than {layout.limit} "
        f"(rows have {layout.row_length}) and are {'split' if pieces.split else 'dropped'} (--kd-long-samples): give a "
        "model with more positions, or shorter samples"
    )


def _pieces(samples: Sequence[Sample], layout: RowLayout, kd: KDConfig) -> Pieces:
    lengths = np.array([len(ids) for ids, _ in samples])
    return cut(lengths, layout.piece_length, drop_long=kd.long_samples == "drop")


def peek(
    job: Job,
    names: Sequence[str],
    count: int,
    most: int,
    show: Callable[[str | Text], None],
    warn: Callable[[str], None],
) -> None:
    """Show `count` samples of each file, `most` tokens of each, and warn of samples that are too long for a model."""
    folder = job.args.tokenizer_model if job.args.tokenizer_type == "HuggingFaceTokenizer" else None
    options, flag = RecordOptions.of(job.kd.data_format, job.kd.bad_records), tokenizer_flag(job.args)
    has_chats = any(map(is_chat_file, names))
    tokenizer = ChatTokenizer(folder, flag=flag).template.tokenizer if has_chats else _tokenizer(folder, flag)
    for name in names:
        samples = first_samples(name, folder, options, flag)
        show(f"{name}:")
        for sample in samples[:count]:
            show(painted(sample, tokenizer, most))
        supervised = sum(int(targets.sum()) for _, targets in samples) / max(1, sum(len(ids) for ids, _ in samples))
        show(f"{supervised:.1%} of the tokens of the first {len(samples)} samples are targets")
        for line in rows_of(samples, job) if is_chat_file(name) or job.kd.packing != "none" else []:
            show(line)
        if (text := too_long(name, samples, job)) is not None:
            warn(text)


def _tokenizer(folder: str | None, flag: str) -> PreTrainedTokenizerBase | None:
    return load_tokenizer(folder, flag) if folder is not None and Path(folder).is_dir() else None
