"""vLLM as the teacher of a job by its hidden states: finding it, testing it, and checking the flags."""

from argparse import Namespace
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mkd.checkpoint.adapters.peft_folder import open_hf_folder
from mkd.checkpoint.source import ModelSource
from mkd.config.kd_config import KDConfig
from mkd.distributed.groups import Groups
from mkd.errors import MkdConfigError
from mkd.job.teachers.common import URL_FLAG, WITHOUT_WAITING_S, SourceAtAddresses, SpecWithoutModel, top_k_description
from mkd.job.teachers.inference import InferenceSource, check_served_rows, known_text, known_text_folders, probe_text
from mkd.teacher.inference.http import ServerAddress
from mkd.teacher.inference.known_text import KnownTextFile
from mkd.teacher.inference.output_layer import OutputLayer
from mkd.teacher.inference.pool import ScoringPool
from mkd.teacher.inference.probe import SHORT, Probe, wait_for_server
from mkd.teacher.inference.states_files import FLAG, StatesFolder
from mkd.teacher.inference.states_model import HEAD_FLAG, TOP_K, StatesModel
from mkd.teacher.inference.states_teacher import StatesPool, StatesTeacher, WantedStates
from mkd.teacher.inference.texts import named_errors
from mkd.teacher.run_ahead import AllRanks, RunAhead
from mkd.teacher.service.answers import HiddenAnswers
from mkd.utils.logging import current_rank

_LONGEST_WAIT_S = 30.0
"""Longest wait for a file after the answer that names it."""


@dataclass(frozen=True)
class StatesSource(SourceAtAddresses):
    """A model behind vLLM servers that extract its hidden states. See `mkd.checkpoint.source.TeacherSource`."""

    server: InferenceSource
    folder: ModelSource
    """The folder of the served model."""
    models: tuple[StatesModel, ...]

    @classmethod
    def find(cls, kd: KDConfig, *, waits: bool) -> "StatesSource":
        """Find the model at each address, and open its folder.

        Args:
            kd: the flags.
            waits: wait for servers that do not answer yet.

        Raises:
            MkdCheckpointError: the folder is incomplete, or its family is not known.
            MkdConfigError: a server is not vLLM, or the folder of files cannot be used.
            MkdTeacherError: see `InferenceSource.find`.
        """
        states = StatesFolder(Path(kd.teacher_states_dir), min(_LONGEST_WAIT_S, kd.teacher_timeout / 4))
        states.check()
        opened = open_hf_folder(kd.teacher_head_hf, HEAD_FLAG)
        folder, output = ModelSource.of_folder(opened, f"{HEAD_FLAG} {kd.teacher_head_hf}"), OutputLayer.of(opened)
        server = InferenceSource.find(kd, waits=waits)
        if server.card.api != "vllm":
            raise MkdConfigError(f"{FLAG} {states.folder} works with vLLM, and {server.origin} is {server.card.api}")
        models = tuple(StatesModel(one.server, one.api, one.name, states, output) for one in server.models)
        return cls(server, folder, models)

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        """See `SourceAtAddresses`."""
        return self.server.addresses

    @property
    def positions(self) -> int | None:
        """See `SourceAtAddresses`."""
        return self.server.positions

    @property
    def vocab_size(self) -> int | None:
        """See `TeacherSource`."""
        return self.folder.vocab_size

    @property
    def tokenizer_hash(self) -> str | None:
        """See `TeacherSource`."""
        return self.folder.tokenizer_hash

    @property
    def tokenizer_folder(self) -> Path | None:
        """See `ModelSource`."""
        return self.folder.tokenizer_folder

    @property
    def output(self) -> OutputLayer:
        """Final norm and LM head."""
        return self.models[0].output

    def fingerprint(self) -> str:
        """See `TeacherSource`: of the folder, as for a model on the student's ranks."""
        return self.folder.fingerprint()


@dataclass(frozen=True)
class StatesTeacherSpec(SpecWithoutModel[StatesSource]):
    """vLLM servers whose hidden states fit the job. See `mkd.job.teachers.interface.TeacherSpec`."""

    source: StatesSource
    args: Namespace
    """Megatron's arguments of the student."""
    kd: KDConfig
    true_vocab: int
    known: tuple[int, ...]
    """A text by which other weights are recognized."""
    load: Path | None
    """Folder of the run that the job continues, whose teacher must be this one; None for a new run."""
    save: Path | None

    @classmethod
    def of(cls, source: StatesSource, args: Namespace, kd: KDConfig, true_vocab: int) -> "StatesTeacherSpec":
        """Check flags, and test the servers from the first rank.

        Raises:
            MkdConfigError: a flag does not work with hidden states of a server.
            MkdTeacherError, MkdNumericError: the server does not answer as the job needs.
        """
        check_served_rows(source, args, kd)
        text, sentence = probe_text(args, true_vocab)
        longest = min(args.seq_length, source.positions or args.seq_length)
        timeout_s = WITHOUT_WAITING_S if source.server.is_last_check else kd.teacher_timeout
        if current_rank() == 0 and not kd.is_plain_pretraining:
            top_k = min(TOP_K, true_vocab)
            Probe(text, sentence, top_k, true_vocab, longest, URL_FLAG, timeout_s).run(source.models)
        return cls(source, args, kd, true_vocab, text[:SHORT], *known_text_folders(args, kd))

    def __str__(self) -> str:
        source, kd = self.source, self.kd
        return (
            f"hidden states of {source.server.card.name} of vllm at {', '.join(map(str, source.addresses))}, in "
            f"{kd.teacher_states_dir}; norm and LM head of {kd.teacher_head_hf}; {kd.teacher_ahead} steps ahead, up to "
            f"{kd.teacher_buffer_gb:g} GB"
        )

    @property
    def served(self) -> list[Namespace]:
        """See `TeacherSpec`."""
        sizes = copy(self.args)
        sizes.hidden_size = self.source.output.width
        return [sizes]

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        return top_k_description(self.kd)

    def build(self, groups: Groups) -> StatesTeacher:
        """See `TeacherSpec`."""
        kd, output, dtype = self.kd, self.source.output, self.args.params_dtype
        ranks = AllRanks(kd.teacher_timeout)
        pool, size = ranks.attempt(lambda: self._open() if groups.leads_replica else (None, 0))
        answers = HiddenAnswers(
            output.width,
            dtype,
            output.logit_map,
            groups,
            self._head(groups),
            sequence_parallel=self.args.sequence_parallel,
            norm=output.norm(dtype).to("cuda") if groups.leads_replica else None,
        )
        ahead = RunAhead(kd.teacher_ahead, kd.teacher_buffer_gb * 1e9, kd.teacher_timeout)
        return StatesTeacher(pool, answers, self.source.fingerprint(), ranks, ahead, bytes_per_token=size)

    def _head(self, groups: Groups) -> Tensor | None:
        """This rank's rows of the LM head; None off the last stage."""
        if not groups.is_last_stage:
            return None
        tp, padded, dtype = groups.tp, self.args.padded_vocab_size, self.args.params_dtype
        return self.source.output.shard(tp.rank(), tp.size(), padded, self.true_vocab, dtype).to("cuda")

    def _open(self) -> tuple[StatesPool, int]:
        """Compare the servers with the teacher of the run; returns threads, and bytes of the states of a token."""
        top_k, files = min(TOP_K, self.true_vocab), [KnownTextFile("--load", self.load)] if self.load else []
        models, timeout_s = self.source.models, self.kd.teacher_timeout
        known = known_text(models, files, self.known, timeout_s, top_k=top_k, vocab=self.true_vocab)
        if self.save is not None:
            file = KnownTextFile("--save", self.save)
            with named_errors(file.flag, file.folder):
                file.write(known)
        origin = f"{URL_FLAG} {models[0].server}"
        states = wait_for_server(lambda: models[0].states(known.text), origin, timeout_s)
        size = states.element_size() * self.source.output.width
        pool = ScoringPool(models, known, _compute, top_k=top_k, vocab=self.true_vocab)
        return pool, size


def _compute(model: StatesModel, text: WantedStates) -> Tensor:
    return text.of(model)
