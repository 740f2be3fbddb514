"""Models and rows of the examples: from folders, or tiny ones that need no download."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

LENGTH = 64
"""Tokens per row."""


@dataclass(frozen=True)
class Setup:
    """A teacher, a student, and the text to distill on."""

    teacher: PreTrainedModel
    student: PreTrainedModel
    rows: Tensor
    """[rows, length] token ids."""
    tokens: int
    """Tokens of the tokenizer."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that both examples have."""
    parser.add_argument("--teacher", metavar="DIR", help="Hugging Face folder (default: tiny models)")
    parser.add_argument("--student", metavar="DIR", help="Hugging Face folder with the teacher's tokenizer")
    parser.add_argument("--text", metavar="FILE", help="plain text (default: CPython's reference pages)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")


def setup(args: argparse.Namespace) -> Setup:
    """Load the folders, or make tiny models whose tokens are bytes; the tiny teacher is trained first, in seconds."""
    if (args.teacher is None) != (args.student is None):
        raise SystemExit("error: give --teacher and --student together, or neither")
    text = "\n".join(topics.values()) if args.text is None else Path(args.text).read_text(encoding="utf-8")
    if args.teacher is None:
        torch.manual_seed(0)
        teacher, student = tiny_model(64, 4), tiny_model(32, 2)
        ids, tokens = list(text.encode()), 256
    else:
        teacher, student = (_load(folder) for folder in (args.teacher, args.student))
        tokenizer = AutoTokenizer.from_pretrained(args.student, local_files_only=True, trust_remote_code=False)
        ids, tokens = tokenizer(text, add_special_tokens=False)["input_ids"], len(tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher, student, rows = teacher.to(device), student.to(device).train(), as_rows(ids).to(device)
    if args.teacher is None:
        pretrain(teacher, rows)
    return Setup(teacher.requires_grad_(False).eval(), student, rows, tokens)


def pretrain(model: PreTrainedModel, rows: Tensor, steps: int = 60) -> None:
    """Train a tiny model on next bytes, so that it has something to teach."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def as_rows(ids: Sequence[int]) -> Tensor:
    """Cut token ids into rows; the rest is left out."""
    count = len(ids) // LENGTH
    if count == 0:
        raise SystemExit(f"error: --text has {len(ids)} tokens; at least {LENGTH} are needed")
    return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)


def tiny_model(width: int, layers: int) -> LlamaForCausalLM:
    """A Llama model with random weights; its vocabulary is padded beyond the 256 bytes."""
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def _load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
