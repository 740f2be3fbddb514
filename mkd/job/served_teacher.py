"""A teacher service as the teacher of a job: asking for its facts, and checking that they fit the job."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.config.kd_config import KDConfig
from mkd.config.teacher_args import row_multiple
from mkd.distributed.groups import Groups
from mkd.errors import MkdConfigError, MkdTeacherError
from mkd.teacher.run_ahead import RunAhead
from mkd.teacher.service.addresses import Secret, ServiceAddress, require_secret
from mkd.teacher.service.client import ServedTeacher
from mkd.teacher.service.connections import TeacherConnections, ask_facts
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.server import MOST_ANSWER_BYTES

URL_FLAG = "--kd-teacher-url"
WITHOUT_WAITING_S = 10.0
"""Limit for the answer of a service that should be running."""


@dataclass(frozen=True)
class ServedSource:
    """A teacher behind one or more addresses. See `mkd.checkpoint.source.TeacherSource`."""

    addresses: tuple[ServiceAddress, ...]
    secret: Secret | None
    facts: TeacherFacts

    @classmethod
    def ask(cls, urls: Sequence[str], timeout_s: float) -> "ServedSource":
        """Ask each address for its teacher.

        Args:
            urls: values of --kd-teacher-url.
            timeout_s: seconds to wait for each of them; the teacher may still be loading.

        Raises:
            MkdConfigError: an address is none, or needs a secret.
            MkdTeacherError: an address does not answer, or they have different teachers.
        """
        addresses = tuple(ServiceAddress.parse(URL_FLAG, url) for url in urls)
        secret = Secret.from_environment()
        for address in addresses:
            require_secret(URL_FLAG, address, secret)
        found = ask_facts(addresses, secret, timeout_s, URL_FLAG)
        for address, facts in zip(addresses, found, strict=True):
            if not facts.is_same(found[0]):
                raise MkdTeacherError(
                    f"{URL_FLAG} {addresses[0]} is the teacher {found[0].fingerprint} ({found[0].description}), "
                    f"{address} is {facts.fingerprint} ({facts.description}): all addresses must be services of one "
                    "teacher, started with the same flags"
                )
        return cls(addresses, secret, found[0])

    @property
    def origin(self) -> str:
        """See `TeacherSource`."""
        return f"{URL_FLAG} {' '.join(map(str, self.addresses))}"

    @property
    def path(self) -> Path:
        """See `TeacherSource`; for messages, since there is no folder."""
        return Path(str(self.addresses[0]))

    @property
    def architecture(self) -> dict[str, Any]:
        """See `TeacherSource`; the limit of positions is all that matters to a job that does not run the model."""
        return {"max_position_embeddings": self.facts.positions}

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


def microbatch_tokens(args: Namespace) -> int:
    """Tokens of the largest microbatch of a job."""
    return max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 0) * args.seq_length


@dataclass(frozen=True)
class ServedTeacherSpec:
    """A teacher service that fits the job. See `mkd.job.teacher.TeacherSpec`."""

    source: ServedSource
    args: Namespace
    """Megatron's arguments of the student."""
    kd: KDConfig

    @classmethod
    def of(cls, source: ServedSource, args: Namespace, kd: KDConfig) -> "ServedTeacherSpec":
        """See `teacher_spec`.

        Raises:
            MkdConfigError: rows of the job do not fit the service.
        """
        facts, origin = source.facts, source.origin
        is_packed, length = kd.packing != "none", args.seq_length
        if is_packed and not facts.packed:
            raise MkdConfigError(
                f"--kd-packing is {kd.packing}, but {origin} was started without it: give it to mkd serve-teacher too"
            )
        if not is_packed and facts.positions is not None and length > facts.positions:
            raise MkdConfigError(f"--seq-length {length} is longer than the teacher's {facts.positions} positions")
        tokens = microbatch_tokens(args)
        if tokens > facts.most_tokens:
            raise MkdConfigError(
                f"a microbatch of {tokens} tokens (--micro-batch-size x --seq-length {length}) is larger than "
                f"{origin} computes, {facts.most_tokens}: start mkd serve-teacher with the --micro-batch-size and "
                "--seq-length of this job, or reduce them here"
            )
        multiples = (("--kd-packing-multiple", kd.packing_multiple, facts.segment_multiple),) if is_packed else ()
        unit = length
        if kd.variable_seq_lengths:
            unit = row_multiple(args, kd)
        for flag, value, multiple in (*multiples, ("--seq-length", unit, facts.row_multiple)):
            if value % multiple:
                raise MkdConfigError(
                    f"{flag} gives multiples of {value} tokens, but the parallel layout of {origin} needs multiples of "
                    f"{multiple}: give --kd-packing-multiple and --seq-length that are multiples of "
                    f"{math.lcm(multiple, facts.segment_multiple)}, without --kd-variable-seq-lengths"
                )
        return cls(source, args, kd)

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.source.addresses))
        return (
            f"served at {listed}: {self.source.facts.description}; {self.kd.teacher_ahead} steps ahead, up to "
            f"{self.kd.teacher_buffer_gb:g} GB"
        )

    @property
    def sources(self) -> list[ServedSource]:
        """See `TeacherSpec`."""
        return [self.source]

    @property
    def models(self) -> list[Namespace]:
        """See `TeacherSpec`: no model runs on the student's ranks."""
        return []

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        kd = self.kd
        return "" if kd.top_k is None else f"the teacher's {kd.top_k} most probable tokens, tail {kd.top_k_tail}"

    def build(self, groups: Groups) -> ServedTeacher:
        """See `TeacherSpec`."""
        source, facts, connections = self.source, self.source.facts, None
        if ServedTeacher.needs_connections(groups):
            most = max(MOST_ANSWER_BYTES, microbatch_tokens(self.args) * facts.bytes_per_token)
            connections = TeacherConnections(source.addresses, source.secret, facts, most)
        return ServedTeacher(
            connections,
            facts,
            groups,
            RunAhead(self.kd.teacher_ahead, self.kd.teacher_buffer_gb * 1e9, self.kd.teacher_timeout),
            padded_vocab=self.args.padded_vocab_size,
            sequence_parallel=self.args.sequence_parallel,
        )
