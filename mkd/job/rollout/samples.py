"""Texts that the student writes at evaluations: samples (--kd-sample-prompts) and answers (--kd-eval-tasks)."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from mkd.checkpoint.tokenizer_hash import read_json_object
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import length_multiple
from mkd.data.sources.prompts import Prompt, end_tokens, read_prompts, require_known_tokens
from mkd.data.sources.tasks import Task, read_tasks
from mkd.distributed.groups import Groups
from mkd.report.samples import Sample
from mkd.rollout.engine.attention import reason_against_cache
from mkd.rollout.interface import Decoding, Engine, Request, WrittenText
from mkd.rollout.write import write_texts
from mkd.utils.model_folders.hub_folder import model_folder
from mkd.utils.model_folders.pretrained import load_tokenizer
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag


@dataclass(frozen=True)
class SampleWriter:
    """Lets the student continue the prompts."""

    prompts: list[Prompt]
    writer: "Writer"

    @classmethod
    def of(cls, args: Namespace, kd: KDConfig, true_vocab: int) -> "SampleWriter | None":
        """The writer of --kd-sample-prompts; None without the flag.

        Raises:
            MkdDataError, MkdCheckpointError: a file cannot be used.
        """
        if kd.sample_prompts is None:
            return None
        writer = Writer.of(args, kd.sample_tokens, true_vocab)
        prompts = read_prompts(kd.sample_prompts, writer.tokenizer, writer.longest_prompt, tokenizer_flag=writer.flag)
        require_known_tokens(prompts, true_vocab)
        return cls(prompts, writer)

    def write(self, chunks: Sequence[nn.Module], groups: Groups) -> list[Sample]:
        """One sample per prompt, the same on all ranks. Collective over all ranks."""
        written = self.writer.write(chunks, groups, self.prompts)
        return [
            Sample(prompt.text, self.writer.text(found), len(found.tokens), found.ended)
            for prompt, found in zip(self.prompts, written, strict=True)
        ]


@dataclass(frozen=True)
class TaskEvaluation:
    """Lets the student answer tasks and measures how many answers are right."""

    tasks: list[Task]
    writer: "Writer"

    @classmethod
    def of(cls, args: Namespace, kd: KDConfig, true_vocab: int) -> "TaskEvaluation | None":
        """The evaluation of --kd-eval-tasks; None without the flag.

        Raises:
            MkdDataError, MkdCheckpointError: a file cannot be used.
        """
        if kd.eval_tasks is None:
            return None
        writer = Writer.of(args, kd.eval_tokens, true_vocab)
        tasks = read_tasks(kd.eval_tasks, writer.tokenizer, writer.longest_prompt, writer.flag)
        require_known_tokens((task.prompt for task in tasks), true_vocab)
        return cls(tasks, writer)

    def measure(self, chunks: Sequence[nn.Module], groups: Groups) -> dict[str, float]:
        """`accuracy` and `cut_off`, the shares of right answers and of those that reached --kd-eval-tokens, the same on
        all ranks. Collective over all ranks."""
        written = self.writer.write(chunks, groups, [task.prompt for task in self.tasks])
        solved = [task.is_solved_by(self.writer.text(found)) for task, found in zip(self.tasks, written, strict=True)]
        return {
            "accuracy": sum(solved) / len(solved),
            "cut_off": sum(not found.ended for found in written) / len(written),
        }


@dataclass(frozen=True)
class Writer:
    """Lets the student continue prompts with its most probable tokens."""

    tokenizer: PreTrainedTokenizerBase
    flag: str
    """The flag that named the tokenizer's folder, for messages."""
    decoding: Decoding
    engine: Engine

    @classmethod
    def of(cls, args: Namespace, tokens: int, true_vocab: int) -> "Writer":
        """Args: Megatron's arguments, tokens that are written at most, and the student's vocabulary size."""
        flag = tokenizer_flag(args)
        tokenizer = load_tokenizer(args.tokenizer_model, flag)
        multiple = length_multiple(args)
        decoding = Decoding(
            tokens=tokens,
            end_tokens=end_tokens(tokenizer, _generation_config(Path(args.tokenizer_model), flag)),
            true_vocab=true_vocab,
            rows=args.eval_micro_batch_size,
            longest=text_positions(args, None) // multiple * multiple,
            length_multiple=multiple,
        )
        return cls(tokenizer, flag, decoding, "cached" if reason_against_cache(args) is None else "uncached")

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt at most."""
        return self.decoding.longest - self.decoding.tokens

    def write(self, chunks: Sequence[nn.Module], groups: Groups, prompts: Sequence[Prompt]) -> list[WrittenText]:
        """One text per prompt, the same on all ranks. Collective over all ranks."""
        return write_texts(chunks, groups, [Request(prompt.tokens) for prompt in prompts], self.decoding, self.engine)

    def text(self, written: WrittenText) -> str:
        """The text without its end token."""
        return self.tokenizer.decode(written.tokens[: len(written.tokens) - written.ended])


def text_positions(args: Namespace, longest: int | None) -> int:
    """Tokens of a text at most: those of a row, and the positions of the models; packed rows may have more."""
    known = (args.seq_length, args.max_position_embeddings, longest)
    return min(positions for positions in known if positions)


def _generation_config(folder: Path, flag: str) -> dict[str, Any]:
    """Raises MkdCheckpointError for a file that is not a JSON object: texts would end elsewhere than the model's."""
    file = model_folder(folder, flag) / "generation_config.json"
    if not file.is_file():
        return {}
    return read_json_object(file, flag)
