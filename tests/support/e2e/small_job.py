"""A distillation job so small that it trains in seconds: two Llama folders, a tokenizer, some text, a command line."""

import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.e2e.launch import launch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "pretrain_kd.py"
END = "<|end|>"
VOCAB = 307
"""Fills no block of 128."""

STUDENT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TEACHER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
"""A teacher whose width, attention heads, rope base and LM head differ from the student's."""


def text() -> str:
    """English prose that every CPython brings along."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("assignment", "class", "compound", "import", "naming"))


def make_tokenizer(vocab_size: int = VOCAB, corpus: str | None = None) -> Tokenizer:
    """Byte-level BPE trained on `corpus`, with `END` as its last token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([corpus or text()], trainer)
    tokenizer.add_special_tokens([END])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """As transformers' AutoTokenizer reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(folder: Path, tokenizer: Tokenizer, seed: int, sizes: Mapping[str, Any]) -> Path:
    """A random Llama with a tokenizer, as a Hugging Face folder in fp32."""
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), bos_token_id=None, eos_token_id=0, **sizes)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.08, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def write_data(prefix: Path, documents: list[list[int]]) -> Path:
    """PREFIX.bin and PREFIX.idx, as Megatron's own tool writes them; nothing beside them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for tokens in documents:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@dataclass(frozen=True)
class SmallJob:
    """Folders and files of a job, and its command line."""

    root: Path
    teacher: Path
    student: Path
    data: Path
    """PREFIX of .bin and .idx"""

    def flags(self, changes: Mapping[str, Any] | None = None) -> list[str]:
        """The command line after `pretrain_kd.py`.

        Args:
            changes: flag -> value; True for a flag without a value, a list for several values, None to leave it out.
        """
        flags: dict[str, Any] = {
            "--kd-teacher-hf": self.teacher,
            "--kd-student-hf": self.student,
            "--kd-ratio": 0.5,
            "--data-path": self.data,
            "--data-cache-path": self.root / "cache",
            "--split": "90,10,0",
            "--seq-length": 32,
            "--micro-batch-size": 2,
            "--global-batch-size": 4,
            "--train-iters": 3,
            "--eval-iters": 1,
            "--eval-interval": 1000,
            "--log-interval": 1,
            "--lr": 1e-3,
            "--num-workers": 0,
            **(changes or {}),
        }
        words: list[str] = []
        for flag, value in flags.items():
            if value is None:
                continue
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [flag, *map(str, values)]
        return words


def make_small_job(root: Path) -> SmallJob:
    """Teacher, student and data under `root`; the same every time."""
    tokenizer = make_tokenizer()
    end = tokenizer.token_to_id(END)
    documents = [[*tokenizer.encode(part).ids, end] for part in text().split("\n\n") if part]
    return SmallJob(
        root=root,
        teacher=make_model(root / "teacher", tokenizer, 1, TEACHER),
        student=make_model(root / "student", tokenizer, 2, STUDENT),
        data=write_data(root / "text_document", documents),
    )


@dataclass(frozen=True)
class Result:
    """Exit status, output and metrics of a finished command."""

    status: int
    output: str
    """stdout"""
    errors: str
    """stderr"""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The lines of the metrics file."""


def environment(port: int | None = None, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """The environment of one of `ranks` ranks on CPU; by default that of a single rank."""
    return os.environ | {
        "MKD_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
    }


def free_port() -> int:
    """Below those that the kernel hands out by itself, so that nobody takes it before the job does."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run(
    flags: list[str], ranks: int = 1, timeout: float = 300.0, script: Path = SCRIPT, by_itself: bool = False
) -> Result:
    """Run `pretrain_kd.py`, or another script of this project, with these flags.

    The metrics are those of `--kd-metrics-file`, or of the `--save` folder.

    Args:
        flags: the words after the script.
        ranks: how many processes.
        timeout: seconds.
        script: what to run.
        by_itself: one rank with a Python of its own, as users run it. Otherwise as forks of a process that has
            imported everything (`tests.support.e2e.launch`), 6 s of CPU per rank faster.
    """
    if by_itself:
        assert ranks == 1
        command = [sys.executable, str(script), *flags]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
        return Result(done.returncode, done.stdout, done.stderr, _metrics(flags))
    port = free_port()
    environments = [environment(port, rank, ranks) for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        seen = launch([str(script), *flags], environments, Path(folder), timeout)
    return Result(*seen, _metrics(flags))


def under_torchrun(python: Path, words: list[str], ranks: int = 2) -> tuple[list[str], dict[str, str]]:
    """Command and environment of torchrun and its ranks, all of them processes of `quick_python`."""
    env = environment()
    launcher = [torch.distributed.run.__file__, "--no-python", f"--nproc-per-node={ranks}"]
    command = [str(python), *launcher, f"--master-port={env['MASTER_PORT']}", str(python), *words]
    return command, {name: value for name, value in env.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def _metrics(flags: list[str]) -> list[dict[str, Any]]:
    given = dict(itertools.pairwise(flags))
    file = Path(given["--kd-metrics-file"]) if "--kd-metrics-file" in given else None
    if file is None and "--save" in given:
        file = Path(given["--save"]) / "metrics.jsonl"
    if file is None or not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]
