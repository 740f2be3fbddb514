"""A teacher service as the teacher of a job: asking for its facts, and checking that they fit the job."""

import math
from argparse import Namespace
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mkd import cpu
from mkd.checkpoint.source import EnsembleSource
from mkd.checkpoint.tokenizer_hash import tokenizer_hash
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import row_multiple
from mkd.distributed.groups import Groups
from mkd.errors import MkdConfigError, MkdTeacherError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.teachers.common import URL_FLAG, SourceAtAddresses, SpecWithoutModel, top_k_description
from mkd.losses import LogitMap
from mkd.teacher.run_ahead import AllRanks, RunAhead
from mkd.teacher.service.addresses import Address, Secret, parse_address, require_secret
from mkd.teacher.service.answers import HiddenAnswers, TargetAnswers
from mkd.teacher.service.client import ServedTeacher
from mkd.teacher.service.connections import TeacherConnections, request_facts
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.lm_head import fetch_head, requests_head
from mkd.teacher.service.messages import MOST_ANSWER_BYTES
from mkd.teacher.service.targets import SampledTargets, Targets, TopKTargets
from mkd.utils.model_folders.hub_folder import model_folder


@dataclass(frozen=True)
class ServedSource(SourceAtAddresses):
    """A teacher behind one or more addresses. See `mkd.checkpoint.source.TeacherSource`."""

    addresses: tuple[Address, ...]
    secret: Secret | None
    facts: TeacherFacts
    tokenizer_folder: Path | None = None
    """Folder with the files of its tokenizer; None if it is not given."""

    @classmethod
    def find(cls, urls: Sequence[str], timeout_s: float) -> "ServedSource":
        """Find the one teacher behind all addresses.

        Raises:
            MkdError: see `find_each`; or there are several teachers.
        """
        found = cls.find_each(urls, timeout_s)
        if len(found) > 1:
            one, other = found[:2]
            raise MkdTeacherError(
                f"{URL_FLAG} {one.addresses[0]} is the teacher {one.facts.fingerprint} ({one.facts.description}), "
                f"{other.addresses[0]} is {other.facts.fingerprint} ({other.facts.description}): all addresses must be "
                "services of one teacher, started with the same flags; for several teachers give --kd-teacher-weights "
                "or --kd-teachers-mode"
            )
        return found[0]

    @classmethod
    def find_each(cls, urls: Sequence[str], timeout_s: float) -> "list[ServedSource]":
        """Find the teacher of each address: one source per teacher, in the order of first addresses.

        Args:
            urls: values of --kd-teacher-url.
            timeout_s: seconds to wait for each of them; the teacher may still be loading.

        Raises:
            MkdConfigError: an address is invalid, or needs a secret.
            MkdTeacherError: an address does not answer.
        """
        addresses = tuple(parse_address(URL_FLAG, url) for url in urls)
        secret = Secret.from_environment()
        for address in addresses:
            require_secret(URL_FLAG, address, secret)
        teachers: list[ServedSource] = []
        for address, facts in zip(addresses, request_facts(addresses, secret, timeout_s, URL_FLAG), strict=True):
            for number, one in enumerate(teachers):
                if facts.is_same(one.facts):
                    teachers[number] = replace(one, addresses=(*one.addresses, address))
                    break
            else:
                teachers.append(cls((address,), secret, facts))
        return teachers

    @classmethod
    def of_job(cls, kd: KDConfig, timeout_s: float) -> "ServedSource | EnsembleSource":
        """The teacher, or the teachers, of --kd-teacher-url.

        Raises:
            MkdError: see `find_each`; or the number of teachers or a tokenizer is another than the flags have.
        """
        weights = kd.teacher_weights
        if weights is None and kd.teachers_mode == "sum":
            teachers = [cls.find(kd.teacher_url, timeout_s)]
        else:
            teachers = cls.find_each(kd.teacher_url, timeout_s)
            if len(teachers) == 1 or (weights is not None and len(weights) != len(teachers)):
                given = f"--kd-teachers-mode {kd.teachers_mode}" if weights is None else f"{len(weights)} weights"
                raise MkdConfigError(
                    f"{URL_FLAG} {' '.join(kd.teacher_url)} are services of {len(teachers)} teachers, which does not "
                    f"fit {given}: give as many --kd-teacher-weights as there are teachers, or leave them and "
                    "--kd-teachers-mode out for one"
                )
        if kd.teacher_tokenizer is not None:
            teachers = _with_tokenizers(teachers, kd.teacher_tokenizer)
        return teachers[0] if len(teachers) == 1 else EnsembleSource(tuple(teachers))

    @property
    def positions(self) -> int | None:
        """See `SourceAtAddresses`."""
        return self.facts.positions

    @property
    def vocab_size(self) -> int:
        """See `TeacherSource`."""
        return self.facts.vocab

    @property
    def tokenizer_hash(self) -> str | None:
        """See `TeacherSource`."""
        return self.facts.tokenizer

    def fingerprint(self) -> str:
        """See `TeacherSource`."""
        return self.facts.fingerprint


def microbatch_tokens(args: Namespace, length: int) -> int:
    """Tokens of the largest microbatch of a job, in rows of `length` tokens."""
    return max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 0) * length


def _with_tokenizers(teachers: Sequence[ServedSource], folders: Sequence[str]) -> list[ServedSource]:
    """The teachers with the folders of their tokenizers.

    Raises:
        MkdConfigError: a folder has the tokenizer of none of them.
    """
    flag = "--kd-teacher-tokenizer"
    known: dict[str, Path] = {}
    for folder in folders:
        own = tokenizer_hash(Path(folder), flag)
        if own is None or own not in {one.facts.tokenizer for one in teachers}:
            raise MkdConfigError(
                f"{flag} {folder} is not the tokenizer of a teacher of {URL_FLAG}: give the folder that the service "
                "was started with, or a copy of its tokenizer's files"
            )
        known[own] = model_folder(Path(folder), flag)
    return [replace(one, tokenizer_folder=known.get(one.facts.tokenizer)) for one in teachers]


@dataclass(frozen=True)
class ServedTeacherSpec(SpecWithoutModel[ServedSource]):
    """A teacher service that fits the job. See `mkd.job.teachers.interface.TeacherSpec`."""

    source: ServedSource
    args: Namespace
    """Megatron's arguments of the student."""
    kd: KDConfig
    cross: CrossTokenizers | None = None
    """None if the teacher has the student's tokenizer."""
    targets: Targets | None = None
    """Targets that the service computes; None for hidden states."""

    @classmethod
    def of(
        cls,
        source: ServedSource,
        args: Namespace,
        kd: KDConfig,
        true_vocab: int,
        cross: CrossTokenizers | None = None,
    ) -> "ServedTeacherSpec":
        """See `from_flags.teacher_spec`.

        Raises:
            MkdConfigError: rows or targets of the job do not fit the service.
        """
        facts, origin = source.facts, source.origin
        own_tokens = None if cross is None else cross.own_tokens(source)
        flag = "--seq-length" if own_tokens is None else "--kd-teacher-seq-length"
        is_packed, length = kd.packing != "none", args.seq_length if own_tokens is None else own_tokens[1]
        if is_packed and not facts.packed:
            raise MkdConfigError(
                f"--kd-packing is {kd.packing}, but {origin} was started without it: give it to mkd serve-teacher too"
            )
        if not is_packed and facts.positions is not None and length > facts.positions:
            raise MkdConfigError(f"{flag} {length} is longer than the teacher's {facts.positions} positions")
        tokens = microbatch_tokens(args, length)
        if tokens > facts.most_tokens:
            raise MkdConfigError(
                f"a microbatch of {tokens} tokens (--micro-batch-size x {flag} {length}) is larger than "
                f"{origin} computes, {facts.most_tokens}: start mkd serve-teacher with a --micro-batch-size x "
                "--seq-length of as many tokens, or reduce them here"
            )
        multiples = (("--kd-packing-multiple", kd.packing_multiple, facts.segment_multiple),) if is_packed else ()
        unit = length
        if kd.variable_seq_lengths:
            unit = row_multiple(args, kd)
        for given, value, multiple in (*multiples, (flag, unit, facts.row_multiple)):
            if value % multiple:
                raise MkdConfigError(
                    f"{given} gives multiples of {value} tokens, but the parallel layout of {origin} needs multiples "
                    f"of {multiple}: give --kd-packing-multiple and {flag} that are multiples of "
                    f"{math.lcm(multiple, facts.segment_multiple)}, without --kd-variable-seq-lengths"
                )
        return cls(source, args, kd, None if own_tokens is None else cross, _targets(facts, kd, true_vocab))

    def __str__(self) -> str:
        listed, targets = ", ".join(map(str, self.source.addresses)), self.targets
        answers = "" if targets is None else f", {targets.entries} entries per token"
        return (
            f"served at {listed}: {self.source.facts.description}{answers}; {self.kd.teacher_ahead} steps ahead, up "
            f"to {self.kd.teacher_buffer_gb:g} GB"
        )

    @property
    def served(self) -> list[Namespace]:
        """See `TeacherSpec`; a few numbers per token are all that top-k targets have on the student's ranks."""
        if self.targets is not None:
            return []
        sizes = copy(self.args)
        sizes.hidden_size, sizes.params_dtype = self.source.facts.width, self.source.facts.torch_dtype
        if self.cross is not None:
            sizes.padded_vocab_size, sizes.seq_length = self.cross.own_tokens(self.source)
        return [sizes]

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        if self.kd.teacher_samples is not None:
            return f"{self.kd.teacher_samples} tokens sampled from the teacher"
        return top_k_description(self.kd)

    @property
    def logit_softcap(self) -> float | None:
        """Softcap of its logits; None without one."""
        return self.source.facts.logit_softcap

    @property
    def _row_length(self) -> int:
        """Tokens of a row in the teacher's tokenizer."""
        return self.args.seq_length if self.cross is None else self.cross.own_tokens(self.source)[1]

    def build(self, groups: Groups, layouts: object = None) -> ServedTeacher:
        """See `TeacherSpec`; `layouts` is for models."""
        source, facts, connections, view = self.source, self.source.facts, None, None
        columns = torch.arange(self.args.padded_vocab_size).chunk(groups.tp.size())[groups.tp.rank()]
        if self.cross is not None:
            view = self.cross.view_of(source)
            columns = self.cross.vocabulary(view, groups).teacher_columns
        if groups.leads_replica or requests_head(groups):
            most = max(MOST_ANSWER_BYTES, microbatch_tokens(self.args, self._row_length) * facts.bytes_per_token)
            pins = not cpu.is_active()
            connections = TeacherConnections(source.addresses, source.secret, facts, most, pins=pins)
        ranks = AllRanks(self.kd.teacher_timeout)
        if self.targets is not None:
            answers = TargetAnswers(facts, groups, self.targets)
        else:
            answers = HiddenAnswers(
                facts.width,
                facts.torch_dtype,
                LogitMap(facts.logit_scale, facts.logit_softcap),
                groups,
                fetch_head(connections, facts, columns, groups, ranks, self.kd.teacher_timeout),
                sequence_parallel=self.args.sequence_parallel,
                view=view,
            )
        ahead = RunAhead(self.kd.teacher_ahead, self.kd.teacher_buffer_gb * 1e9, self.kd.teacher_timeout)
        return ServedTeacher(connections, facts, answers, ranks, ahead, view=view, targets=self.targets)


def _targets(facts: TeacherFacts, kd: KDConfig, true_vocab: int) -> Targets | None:
    """The targets of --kd-teacher-targets.

    Raises:
        MkdConfigError: they are larger than hidden states.
    """
    if kd.teacher_targets == "hidden_states" or kd.is_plain_pretraining:
        return None
    temperature = kd.temperature_over_time.start
    if kd.teacher_samples is not None:
        flag, targets = "--kd-teacher-samples", SampledTargets(kd.teacher_samples, true_vocab, temperature)
    else:
        # To renormalize, no sum is used; T may change from step to step.
        temperature = 1.0 if kd.top_k_tail == "renormalize" else temperature
        flag, targets = "--kd-top-k", TopKTargets(kd.top_k, true_vocab, temperature)
    if targets.bytes_per_token >= facts.bytes_per_token:
        raise MkdConfigError(
            f"--kd-teacher-targets {kd.teacher_targets} has {targets.bytes_per_token} bytes per token with {flag} "
            f"{targets.entries}, and the teacher's hidden states have {facts.bytes_per_token}: leave it out, or give "
            "a smaller number"
        )
    return targets
