"""An inference server (vLLM, SGLang) as the teacher of a job: finding its model, testing it, and checking the flags."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.checkpoint.tokenizer_hash import hash_hex
from mkd.config.kd_config import KDConfig
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError, MkdConfigError
from mkd.job.data import refuse_data_cache
from mkd.job.teachers.common import URL_FLAG, WITHOUT_WAITING_S, SourceAtAddresses, SpecWithoutModel
from mkd.job.tokenizers import hash_of_tokenizer
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.record_format import MAX_VOCAB
from mkd.teacher.cache.writer import check_folder
from mkd.teacher.inference.apis import APIS
from mkd.teacher.inference.http import HttpServer, ServerAddress, parse_addresses
from mkd.teacher.inference.known_text import KnownText, KnownTextFile
from mkd.teacher.inference.pool import IN_FLIGHT, ScoringPool, ServedModel
from mkd.teacher.inference.probe import SHORT, ModelCard, Probe, find_model, wait_for_server
from mkd.teacher.inference.scores import TokenScores
from mkd.teacher.inference.teacher import InferenceTeacher
from mkd.teacher.inference.texts import TextStore, named_errors
from mkd.teacher.run_ahead import AllRanks, RunAhead
from mkd.utils.logging import current_rank
from mkd.utils.model_folders.pretrained import load_tokenizer
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag

CACHE_FLAG = "--kd-teacher-cache"
_BEYOND_TEXT = 2
"""Positions that a request needs beyond the tokens of its text: the label of the last one, and one generated token."""
_SENTENCE = (
    "Knowledge distillation trains a small model on the distributions of a large one: f(x) = 3.14 * x ** 2, naïve café,"
    " \u6771\u4eac\n\tand 1,024 more tokens."
)


@dataclass(frozen=True)
class InferenceSource(SourceAtAddresses):
    """A model behind one or more inference servers. See `mkd.checkpoint.source.TeacherSource`."""

    addresses: tuple[ServerAddress, ...]
    models: tuple[ServedModel, ...]
    card: ModelCard
    """The list entry of the first of them."""
    is_last_check: bool
    """True if no training follows: servers are tested while flags are checked."""

    @classmethod
    def find(cls, kd: KDConfig, *, waits: bool) -> "InferenceSource":
        """Find the model at each address.

        Args:
            kd: the flags.
            waits: wait for servers that do not answer yet.

        Raises:
            MkdConfigError: an address is invalid.
            MkdTeacherTimeout: a server does not answer.
            MkdTeacherError: it is not an inference server, or they serve different models.
        """
        addresses = parse_addresses(URL_FLAG, kd.teacher_url)
        timeout_s, models, cards = kd.teacher_timeout if waits else WITHOUT_WAITING_S, [], []
        for address in addresses:
            server = HttpServer(address, kd.teacher_timeout, IN_FLIGHT)
            find = partial(find_model, server, address, kd.teacher_api, URL_FLAG)
            card = wait_for_server(find, f"{URL_FLAG} {address}", timeout_s)
            models.append(ServedModel(server, APIS[card.api](), card.name))
            cards.append(card)
        for address, card in zip(addresses, cards, strict=True):
            if card.name != cards[0].name:
                raise MkdConfigError(
                    f"{URL_FLAG} {addresses[0]} serves {cards[0].name:.100}, {address} serves {card.name:.100}: all "
                    "addresses must have one model, under one name"
                )
        return cls(addresses, tuple(models), cards[0], is_last_check=not waits)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest text that it scores; None if unknown."""
        listed = self.card.positions
        return None if listed is None else listed - _BEYOND_TEXT

    vocab_size: None = None
    """See `TeacherSource`: servers do not list it."""
    tokenizer_hash: None = None
    """See `TeacherSource`."""

    def fingerprint(self) -> str:
        """See `TeacherSource`: of the model's name. Its weights are recognized by the scores of a known text."""
        return hash_hex(f"model of an inference server\n{self.card.name}".encode())


@dataclass(frozen=True)
class InferenceTeacherSpec(SpecWithoutModel[InferenceSource]):
    """A model behind inference servers that fits the job. See `mkd.job.teachers.interface.TeacherSpec`."""

    source: InferenceSource
    kd: KDConfig
    meta: CacheMeta
    """Properties of the records that answers are converted to."""
    probe: Probe
    load: Path | None
    """Folder of the run that the job continues, whose teacher must be this one; None for a new run."""
    save: Path | None

    @classmethod
    def of(cls, source: InferenceSource, args: Namespace, kd: KDConfig, true_vocab: int) -> "InferenceTeacherSpec":
        """Check flags, and test the servers from the first rank.

        Raises:
            MkdConfigError: a flag does not work with an inference server.
            MkdCacheError: the folder of --kd-teacher-cache cannot be used.
            MkdTeacherError, MkdNumericError: the server does not answer as the job needs.
        """
        check_served_rows(source, args, kd)
        if true_vocab > MAX_VOCAB:
            raise MkdConfigError(
                f"{source.origin} works with vocabularies of up to {MAX_VOCAB} tokens, not {true_vocab}"
            )
        meta = CacheMeta(
            teacher=source.fingerprint(),
            tokenizer=hash_of_tokenizer(args),
            true_vocab=true_vocab,
            top_k=kd.top_k or 1,  # at R = 0 no text is sent
            values="log12",
            teacher_dtype=source.card.api,
        )
        if kd.teacher_cache is not None:
            refuse_data_cache(Path(kd.teacher_cache), args, CACHE_FLAG)
            folder = Path(kd.teacher_cache)
            check_folder(folder, meta, CACHE_FLAG)
            KnownTextFile(CACHE_FLAG, folder).require_beside(list(folder.glob("shard-*.json")))
        longest = min(args.seq_length, source.positions or args.seq_length) + 1
        text, sentence = probe_text(args, true_vocab)
        timeout_s = WITHOUT_WAITING_S if source.is_last_check else kd.teacher_timeout
        probe = Probe(text, sentence, meta.top_k, true_vocab, longest, URL_FLAG, timeout_s)
        if current_rank() == 0 and not kd.is_plain_pretraining:
            probe.run(source.models)
        return cls(source, kd, meta, probe, *known_text_folders(args, kd))

    def __str__(self) -> str:
        source, kd = self.source, self.kd
        stored = "" if kd.teacher_cache is None else f", answers kept in {kd.teacher_cache}"
        return (
            f"{source.card.name} of {source.card.api} at {', '.join(map(str, source.addresses))}; {kd.teacher_ahead} "
            f"steps ahead, up to {kd.teacher_buffer_gb:g} GB{stored}"
        )

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        return f"the teacher's {self.kd.top_k} most probable tokens, tail {self.kd.top_k_tail}"

    def build(self, groups: Groups) -> InferenceTeacher:
        """See `TeacherSpec`."""
        kd, ranks = self.kd, AllRanks(self.kd.teacher_timeout)
        ahead = RunAhead(kd.teacher_ahead, kd.teacher_buffer_gb * 1e9, kd.teacher_timeout)
        pool, store = ranks.attempt(lambda: self._open() if groups.leads_replica else (None, None))
        return InferenceTeacher(pool, store, self.meta, groups, ranks, ahead)

    def _open(self) -> tuple[ScoringPool, TextStore]:
        """Open the folder, and compare the servers with the teacher that has filled it, and with that of the run."""
        folder = None if self.kd.teacher_cache is None else Path(self.kd.teacher_cache)
        store = TextStore(folder, self.meta, CACHE_FLAG)
        kept = [] if folder is None else [KnownTextFile(CACHE_FLAG, folder)]
        known = known_text(
            self.source.models,
            [*kept, *([] if self.load is None else [KnownTextFile("--load", self.load)])],
            self.probe.text[:SHORT],
            self.kd.teacher_timeout,
            top_k=self.meta.top_k,
            vocab=self.meta.true_vocab,
        )
        for file in kept if self.save is None else [*kept, KnownTextFile("--save", self.save)]:
            with named_errors(file.flag, file.folder):
                file.write(known)
        top_k, vocab = self.meta.top_k, self.meta.true_vocab

        def compute(model: ServedModel, text: Sequence[int]) -> np.ndarray:
            return self.meta.records.encode(model.score(text, top_k, vocab).targets())

        return ScoringPool(self.source.models, known, compute, top_k=top_k, vocab=vocab), store


def known_text(
    models: Sequence[ServedModel],
    files: Sequence[KnownTextFile],
    text: Sequence[int],
    timeout_s: float,
    *,
    top_k: int,
    vocab: int,
) -> KnownText:
    """The known text of the first of these files that exists, or a new one; all servers are compared with all files.

    Args:
        models: the same model of one or more servers.
        files: where known texts may be kept.
        text: the text of a new one.
        timeout_s: longest wait for a server.
        top_k, vocab: see `ServedModel.score`.

    Raises:
        MkdCacheError: a file is damaged, or of another vocabulary.
        MkdTeacherError, MkdNumericError: a server is another teacher, or does not answer.
    """

    def scores_of(model: ServedModel, text: Sequence[int]) -> TokenScores:
        return wait_for_server(lambda: model.score(text, top_k, vocab), f"{URL_FLAG} {model.server}", timeout_s)

    every = [(file.origin, known) for file in files if (known := file.read()) is not None]
    if not every:
        every = [(str(models[0].server), KnownText(tuple(text), scores_of(models[0], text)))]
    for since, known in every:
        if max(known.text) >= vocab:
            raise MkdCacheError(f"the known text of {since} has tokens beyond the vocabulary of {vocab}: remove it")
        for model in models:
            known.check(scores_of(model, known.text), f"{URL_FLAG} {model.server}", since)
    return every[0][1]


def known_text_folders(args: Namespace, kd: KDConfig) -> tuple[Path | None, Path | None]:
    """Folder of the run that the job continues, whose teacher must be the same, and the folder of --save; each may be
    None."""
    load, save = (None if folder is None else Path(folder) for folder in (args.load, args.save))
    is_new = load is None or args.finetune or kd.other_teacher or not (load / TRACKER).exists()
    return None if is_new else load, save


def check_served_rows(source: SourceAtAddresses, args: Namespace, kd: KDConfig) -> None:
    """Refuse rows that a server does not score as the student reads them."""
    for flag, given in (
        ("--reset-position-ids", args.reset_position_ids),
        ("--reset-attention-mask", args.reset_attention_mask),
    ):
        if given:
            raise MkdConfigError(
                f"{flag} does not work with {source.origin}, which scores each row as one text: leave it out, or "
                "give --kd-packing best_fit"
            )
    positions, length = source.positions, args.seq_length
    if kd.packing == "none" and positions is not None and length > positions:
        raise MkdConfigError(
            f"--seq-length {length} is longer than the {positions} tokens that {source.origin} scores: start it "
            f"with --max-model-len {length + _BEYOND_TEXT} (SGLang: --context-length), or give --seq-length "
            f"{positions}"
        )


def probe_text(args: Namespace, vocab: int) -> tuple[tuple[int, ...], str | None]:
    """Token ids to test a server with, and their text; None if no text is known."""
    if args.tokenizer_type == "HuggingFaceTokenizer" and Path(args.tokenizer_model).is_dir():
        ids = load_tokenizer(args.tokenizer_model, tokenizer_flag(args)).encode(_SENTENCE, add_special_tokens=False)
        if len(ids) >= SHORT and max(ids) < vocab:
            return tuple(ids), _SENTENCE
    return tuple((7919 * number) % vocab for number in range(1, 4 * SHORT)), None
