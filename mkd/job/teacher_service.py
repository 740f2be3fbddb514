"""The job of a teacher service, from its command line to the loop that answers requests."""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from mkd.checkpoint.source import EnsembleSource
from mkd.config import flags
from mkd.config.kd_config import KDConfig
from mkd.config.megatron import arguments
from mkd.config.megatron.fp8_teacher import FP8_TOKENS
from mkd.config.megatron.layouts import length_multiple
from mkd.config.run_state import RunState
from mkd.distributed.groups import Groups
from mkd.errors import MkdConfigError, MkdNodeError
from mkd.job.teacher_check import check_weights
from mkd.job.teachers.from_flags import teacher_source
from mkd.job.teachers.model import ModelTeacherSpec
from mkd.job.tokenizers import hash_of_tokenizer
from mkd.job.without_student import describe_teacher, refuse_flags_of_teachers
from mkd.models.gpt import logit_scale
from mkd.teacher.service.addresses import Address, Secret, parse_address, require_secret
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.model import TeacherRanks
from mkd.teacher.service.monitoring import Monitor
from mkd.teacher.service.server import TeacherServer
from mkd.teacher.service.socket_file import SocketFile
from mkd.utils.logging import EVERY_RANK, logger, set_level

ADDRESS_FLAG = "--address"
_KD_FIELDS = ("teacher_hf", "teacher_load", "teacher_dtype", "packing", "packing_multiple", "log_level", "dry_run")
"""Fields of KDConfig that a service has. The teacher's other ones are refused; those of student, data and
loss are named in a warning."""
_INSTEAD = {
    **dict.fromkeys(
        ("teacher_cache", "teacher_url"), "it is no teacher to run: give --kd-teacher-hf or --kd-teacher-load"
    ),
    "teacher_micro_batch_size": "a service computes one request at a time: give --batch-tokens, or leave it out",
    "teacher_cuda_graph": "requests differ in size: leave it out",
    "teacher_seq_length": "give --seq-length, which is that of the teacher's rows",
}
"""Fields of a teacher that are refused -> what to do."""


@dataclass(frozen=True)
class ServiceOptions:
    """Flags of mkd serve-teacher itself."""

    address: str
    """Address of the service."""
    batch_tokens: int | None = None
    """See `TeacherServer`."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Port of /health and /metrics; None for neither."""

    def check(self) -> None:
        """Raise MkdConfigError for a number out of its bounds."""
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise MkdConfigError(f"--batch-tokens is {self.batch_tokens}; it must be at least 1")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise MkdConfigError(f"--metrics-port is {self.metrics_port}; it must be from 0 (any free port) to 65535")


@dataclass(frozen=True)
class ServiceJob:
    """A checked job; no weight is loaded and no process group exists yet."""

    args: Namespace
    """Megatron's arguments of the teacher, which are also its global ones."""
    teacher: ModelTeacherSpec
    address: Address
    secret: Secret | None
    options: ServiceOptions
    is_dry_run: bool

    @classmethod
    def from_command_line(cls, options: ServiceOptions) -> "ServiceJob":
        """Parse `sys.argv`, which holds flags of mkd train about the teacher and the size of microbatches.

        Args:
            options: the service's own flags.

        Raises:
            MkdError: a flag or file is wrong.
        """
        options.check()
        address, secret = parse_address(ADDRESS_FLAG, options.address), Secret.from_environment()
        require_secret(ADDRESS_FLAG, address, secret)
        args, given = flags.parse_flags()
        refuse_flags_of_teachers(given, _KD_FIELDS, _INSTEAD)
        kd = KDConfig(**{name: given[name] for name in _KD_FIELDS}, ratio=1.0)
        set_level(kd.log_level)
        if unused := _flags_without_effect():
            listed = ", ".join(unused)
            logger.warning(f"no effect on a teacher service, which has no student, data or loss: {listed}")
        source = teacher_source(kd)
        if isinstance(source, EnsembleSource):
            raise MkdConfigError(f"{source.origin} are several teachers, and a service has one: start one for each")
        args.train_iters, args.global_batch_size = 1, None
        describe_teacher(args, source, None)
        _require_one_replica(args)
        arguments.finish(args, kd, RunState())
        vocab = source.vocab_size or arguments.true_vocabulary(args)
        teacher = ModelTeacherSpec.of(source, args, kd, vocab, source.fingerprint())
        return cls(args, teacher, address, secret, options, kd.dry_run)

    @property
    def _is_fp8(self) -> bool:
        return bool(self.teacher.config.transformer.fp8)

    @property
    def facts(self) -> TeacherFacts:
        """Properties of the teacher, and limits of the service."""
        args, source, transformer = self.args, self.teacher.source, self.teacher.config.transformer
        cp, scale = args.context_parallel_size, logit_scale(transformer)
        multiple = length_multiple(args)
        if self._is_fp8:  # any number of rows must have a multiple of this number of tokens on each rank
            ranks = cp * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
            multiple = math.lcm(multiple, FP8_TOKENS * ranks)
        return TeacherFacts(
            fingerprint=self.teacher.stored_fingerprint,
            description=str(self.teacher),
            tokenizer=source.tokenizer_hash or hash_of_tokenizer(args),
            vocab=self.teacher.true_vocab,
            positions=source.architecture.get("max_position_embeddings"),
            width=transformer.hidden_size,
            logit_scale=float(scale.scale),
            logit_softcap=scale.softcap,
            dtype=str(transformer.params_dtype).removeprefix("torch."),
            packed=self.teacher.kd.packing != "none",
            most_tokens=args.micro_batch_size * args.seq_length,
            is_fp8=self._is_fp8,
            row_multiple=multiple,
            segment_multiple=2 * cp if cp > 1 else 1,
        )

    def serve(self, is_stopping: Callable[[], bool]) -> None:
        """Load the teacher, and answer requests until `is_stopping()`. Collective over all ranks.

        Raises:
            MkdNodeError: the address cannot be used.
            MkdCheckpointError: the teacher has weights that are not finite.
        """
        groups = Groups.from_megatron()
        server = self._listen() if groups.leads_replica else None
        monitor = None if server is None else self._monitor(server)
        sequence_parallel = self.teacher.config.transformer.sequence_parallel
        teacher = self.teacher.build(groups)
        check_weights(teacher.model, self.teacher.source)
        ranks = TeacherRanks(
            teacher,
            groups,
            sequence_parallel=sequence_parallel,
            token_multiple=FP8_TOKENS if self._is_fp8 else 1,
        )
        head = ranks.lm_head(self.teacher.true_vocab)
        if server is None:
            ranks.follow()
            return
        who = "this user" if isinstance(self.address, SocketFile) else "this machine"
        secured = "a secret is required" if self.secret else f"{who} only, without a secret"
        logger.info(
            f"serving the teacher {self.teacher.stored_fingerprint} at {server.address} ({secured})", extra=EVERY_RANK
        )
        server.serve(ranks, head, is_stopping)
        server.close()
        if monitor is not None:
            monitor.close()
        logger.info("every request that was received is answered; the service ends", extra=EVERY_RANK)

    def _listen(self) -> TeacherServer:
        try:
            return TeacherServer(self.facts, self.address, self.secret, self.options.batch_tokens)
        except zmq.ZMQError as error:
            raise MkdNodeError(f"{ADDRESS_FLAG} {self.address} cannot be used: {error}") from error

    def _monitor(self, server: TeacherServer) -> Monitor | None:
        host, port = self.options.metrics_host, self.options.metrics_port
        if port is None:
            return None
        try:
            monitor = Monitor(host, port, server.status)
        except OSError as error:
            raise MkdNodeError(f"--metrics-port {port} of {host} cannot be used: {error.strerror}") from error
        logger.info(f"health and metrics at {monitor.url}/health and {monitor.url}/metrics", extra=EVERY_RANK)
        return monitor


def _flags_without_effect() -> list[str]:
    """The --kd-* flags on the command line that a service does not have."""
    used = {f"kd_{name}" for name in (*_KD_FIELDS, "config", "verbose")}
    given = flags.flags_given()
    return sorted(flag for name, flag in given.items() if name.startswith("kd_") and name not in used)


def _require_one_replica(args: Namespace) -> None:
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    if args.world_size > math.prod(sizes) > 0:
        raise MkdConfigError(
            f"{args.world_size} ranks are several replicas of a teacher at --tensor-model-parallel-size {sizes[0]} x "
            f"--pipeline-model-parallel-size {sizes[1]} x --context-parallel-size {sizes[2]}: start one service for "
            "each replica, and name all addresses in --kd-teacher-url"
        )
