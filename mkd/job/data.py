"""The data of a job: checked from its flags alone, then built."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.global_vars import get_tokenizer
from megatron.training.training import get_train_valid_test_num_samples, update_train_iters

from mkd.checkpoint.source import PositionLimit
from mkd.config.check_list import Sink
from mkd.config.kd_config import KDConfig
from mkd.config.megatron import data_args
from mkd.config.megatron.checks.rows import check_rows
from mkd.config.megatron.epochs import iterations_are_unknown
from mkd.config.megatron.layouts import row_multiple
from mkd.data.checks import check_data, check_splits
from mkd.data.datasets import build_datasets
from mkd.data.epochs import Reading, readings_of_documents
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_sets import RowSets
from mkd.data.packing.streams import RowOptions
from mkd.data.sources.chat import ChatTokenizer
from mkd.data.sources.record_forms import RecordOptions
from mkd.data.sources.stores import chat_files, check_chat_file, is_chat_file
from mkd.errors import MkdCacheError
from mkd.job.cross_tokenizer import CrossTokenizers, row_layout
from mkd.teacher.cache.meta import META
from mkd.utils.logging import logger
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag


def refuse_data_cache(folder: Path, args: Namespace, flag: str) -> None:
    """Refuse a new folder of teacher targets to which the job also writes tokens of chats and indices of documents.

    Raises:
        MkdCacheError: the folder is the data cache, or contains it.
    """
    if (folder / META).exists():  # a cache that is continued: files of another kind do not disturb it
        return
    if args.data_cache_path is None:
        names = data_args.data_prefixes(args)
        caches = [Path(chat_files(name)[0] if is_chat_file(name) else name).parent / "cache" for name in names]
    else:
        caches = [Path(args.data_cache_path)]
    cache = next((cache for cache in caches if cache.resolve().is_relative_to(folder.resolve())), None)
    if cache is not None:
        where = "is" if cache.resolve() == folder.resolve() else f"holds {cache},"
        raise MkdCacheError(
            f"{flag} {folder} {where} the data cache of this job (--data-cache-path): give a folder of its own"
        )


@contextmanager
def _known_train_iters(args: Namespace) -> Iterator[None]:
    """Set `args.train_iters` from --train-samples, for the `with` block only.

    Megatron computes the schedule of the learning rate over samples, with --lr-warmup-samples and --lr-decay-samples,
    only while it is None.
    """
    given = args.train_iters
    try:
        update_train_iters(args)
        yield
    finally:
        args.train_iters = given


def number_of_iterations(args: Namespace) -> int:
    """Iterations of the whole run, from --train-iters or --train-samples."""
    with _known_train_iters(args):
        return args.train_iters


def wanted_samples(args: Namespace) -> tuple[int, int, int]:
    """Samples of the training, validation and test set that the whole run reads, as Megatron computes them."""
    with _known_train_iters(args):
        return get_train_valid_test_num_samples()


@dataclass(frozen=True)
class JobData:
    """The data files of a job and the options of its rows."""

    args: Namespace
    """Megatron's, complete and global."""
    kd: KDConfig
    true_vocab: int | None
    """Ids from here up do not exist in the model; None if unknown, for checks of files only."""
    cross: CrossTokenizers | None = None
    """Teachers with other tokenizers; None without any."""
    teacher_limit: PositionLimit | None = None
    """Fewest positions of the teachers that read the student's rows; None if unlimited."""

    def check(self, tokenizer_hash: str | None) -> None:
        """Check flags and files, before any weight is loaded.

        Args:
            tokenizer_hash: hash of the model's tokenizer; None if unknown.

        Raises:
            MkdConfigError, MkdDataError: anything that would stop the job later.
        """
        names = data_args.data_prefixes(self.args)
        check_rows(self.args, self.kd, has_chats=any(map(is_chat_file, names)))
        self.check_files(tokenizer_hash)
        self.check_splits()

    def check_files(self, tokenizer_hash: str | None, sink: Sink = nullcontext) -> bool:
        """Check each file in a context of `sink`, token files before chat files.

        Returns:
            True if all files passed.

        Raises:
            MkdDataError: a file that is missing or damaged, or has tokens that the model does not have.
        """
        names = sorted(data_args.data_prefixes(self.args), key=is_chat_file)
        passed = 0
        for name in names:
            with sink():
                if not is_chat_file(name):
                    check_data([name], self.true_vocab or sys.maxsize, tokenizer_hash)
                elif self.args.tokenizer_model is not None:
                    check_chat_file(name, self.chat_tokenizer)
                passed += 1
        return passed == len(names)

    def check_splits(self) -> None:
        """Raise MkdDataError for a split without documents."""
        check_splits(data_args.dataset_config(self.args, get_tokenizer()), evaluates=self.args.eval_iters > 0)

    def sets(self) -> list[Any]:
        """Train, validation and test set. Collective over all ranks."""
        if not self.has_own_rows:
            self._log_readings()
        config = data_args.dataset_config(self.args, get_tokenizer())
        return build_datasets(
            config,
            wanted_samples(self.args),
            evaluated=self._rows_of_an_evaluation,
            rows=self._row_sets(config) if self.has_own_rows else None,
            true_vocab=self.true_vocab,
        )

    def check_all(self) -> None:
        """Tokenize chat files and plan rows without ranks, as a dry run does beyond `check`."""
        if self.has_own_rows and self.args.rank == 0:
            self.sets()
        elif not self.has_own_rows:
            self._log_readings()

    def readings(self) -> list[Reading]:
        """Approximate number of epochs of each file; see `readings_of_documents`."""
        train, _, test = (0, 0, 0) if iterations_are_unknown(self.args) else wanted_samples(self.args)
        config = data_args.dataset_config(self.args, get_tokenizer())
        return readings_of_documents(config, (train, self._rows_of_an_evaluation, test))

    def rows_per_epoch(self) -> int:
        """Rows of the training files that hold every sample once, over all files; estimated for concatenated documents.

        Tokenizes chat files. Collective over all ranks if torch.distributed is initialized.
        """
        config = data_args.dataset_config(self.args, get_tokenizer())
        if self.has_own_rows:
            return self._row_sets(config).rows_per_epoch()
        return sum(reading.per_epoch for reading in readings_of_documents(config, (1, None, None)))

    def _log_readings(self) -> None:
        for reading in self.readings() if self.args.rank == 0 else ():
            about = f"concatenated documents, about {reading.per_epoch} rows"
            self._log(f"{reading.split:10s} {reading.name}: {about}; {reading}")
            if reading.warning is not None:
                self._log(f"warning: {reading.warning}")

    def _log(self, text: str) -> None:
        logger.info(f"data       {text}")

    @property
    def _rows_of_an_evaluation(self) -> int:
        return self.args.eval_iters * self.args.eval_global_batch_size

    @property
    def has_own_rows(self) -> bool:
        """True if rows are made of whole samples, not by Megatron's concatenation of documents."""
        return (
            self.cross is not None
            or self.kd.packing != "none"
            or any(map(is_chat_file, data_args.data_prefixes(self.args)))
        )

    @property
    def length_multiple(self) -> int | None:
        """Multiple of the microbatches' lengths with --kd-variable-seq-lengths; None without the flag."""
        return row_multiple(self.args, self.kd) if self.kd.variable_seq_lengths else None

    @property
    def longest_sample(self) -> int | None:
        """Positions of the models that read the student's rows; longer samples are split or dropped."""
        return None if self.position_limit is None else self.position_limit.positions

    @property
    def position_limit(self) -> PositionLimit | None:
        """The model that reads the student's rows and has the fewest positions; None if unlimited."""
        positions, folder = self.args.max_position_embeddings, self.kd.student_hf
        name = "the student (--max-position-embeddings)" if folder is None else f"the student --kd-student-hf {folder}"
        known = [PositionLimit(positions, name) if positions else None, self.teacher_limit]
        return min((limit for limit in known if limit is not None), key=lambda limit: limit.positions, default=None)

    @property
    def row_layouts(self) -> list[RowLayout]:
        """Layouts of rows of whole samples: the student's, and those of teachers with other tokenizers."""
        args, kd = self.args, self.kd
        own = row_layout(args.seq_length, kd, self.position_limit, kd_everywhere=kd.mask == "all")
        return [own] if self.cross is None else [own, *self.cross.rows(self.position_limit).options.layout.teachers]

    @property
    def chat_tokenizer(self) -> ChatTokenizer:
        """Tokenizer of chat data."""
        options = RecordOptions.of(self.kd.data_format, self.kd.bad_records)
        return ChatTokenizer(self.args.tokenizer_model, options, tokenizer_flag(self.args))

    def _row_sets(self, config: GPTDatasetConfig) -> RowSets:
        args, kd = self.args, self.kd
        layout = row_layout(args.seq_length, kd, self.position_limit, kd_everywhere=kd.mask == "all")
        return RowSets(
            config=config,
            options=RowOptions(layout, drop_long=kd.long_samples == "drop", seed=args.seed),
            tokenizer=self.chat_tokenizer,
            true_vocab=self.true_vocab,
            log=self._log,
            cross=None if self.cross is None else self.cross.rows(self.position_limit),
        )
