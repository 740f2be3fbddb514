"""Compares the logits of a Hugging Face folder and of a Megatron checkpoint: one process, on the CPU, in fp32.

Call `mkd.cpu.activate()` before this module is imported.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model
from torch import Tensor

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.load import load_megatron_weights
from mkd.checkpoint.ranks import one_rank
from mkd.config.flags import default_arguments
from mkd.config.megatron.teacher_args import teacher_arguments
from mkd.cpu.flags import set_cpu_values
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.models.gpt import gpt_config
from mkd.utils.model_folders.pretrained import load_model, load_tokenizer


@dataclass(frozen=True)
class LogitComparison:
    """Differences of two models on the same tokens."""

    tokens: int
    max_error: float
    """Largest absolute difference of a logit."""
    mean_error: float
    """Mean absolute difference of a logit."""
    perplexities: tuple[float, float]
    """Next-token perplexity of the Hugging Face model and of the Megatron model."""


def check_same_sizes(hf: HFFolder, folder: MegatronFolder) -> None:
    """Refuse two models of different architecture. No weight is read.

    Raises:
        MkdCheckpointError: naming every size that differs.
    """
    theirs, stored = read_architecture(hf)[1], {**vars(default_arguments()), **vars(folder.args)}
    here, there = _sizes(theirs), _sizes(stored)
    differences = [f"{name}: {here[name]} and {there[name]}" for name in here if here[name] != there[name]]
    if theirs["vocab_size"] > stored["padded_vocab_size"]:
        differences.append(f"tokens: {theirs['vocab_size']} and {stored['padded_vocab_size']}")
    if differences:
        raise MkdCheckpointError(
            f"{hf.flag} {hf.path} and {folder.flag} {folder.path} are not the same model: {', '.join(differences)}"
        )


def check_length(folder: MegatronFolder, length: int) -> None:
    """Refuse sequences of `length` tokens that are longer than the model's positions. No weight is read.

    Raises:
        MkdConfigError: --length is beyond the last position.
    """
    positions = getattr(folder.args, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise MkdConfigError(
            f"--length {length} is longer than the {positions} positions of {folder.flag} {folder.path} "
            f"(max_position_embeddings): give at most {positions}"
        )


def _sizes(args: Mapping[str, Any]) -> dict[str, int]:
    """Label -> value of the sizes in Megatron arguments."""
    experts, ffn, heads = args.get("num_experts") or 0, args["ffn_hidden_size"], args["num_attention_heads"]
    return {
        "layers": args["num_layers"],
        "hidden size": args["hidden_size"],
        "ffn hidden size": (args.get("moe_ffn_hidden_size") or ffn) if experts else ffn,
        "attention heads": heads,
        "query groups": args["num_query_groups"] if args["group_query_attention"] else heads,
        "channels of a head": args["kv_channels"],
        "experts": experts,
    }


def tokens_of_text(hf: HFFolder, text: Path, rows: int, length: int) -> Tensor:
    """[n, length] int64 ids of the first tokens of a text file, n at most `rows`.

    Raises:
        MkdConfigError: there is no such file, or it has fewer than `length` tokens.
        MkdDataError: the folder's tokenizer cannot be loaded.
    """
    if not text.is_file():
        raise MkdConfigError(f"--text {text} does not exist")
    tokenizer = load_tokenizer(str(hf.path), hf.flag)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    rows = min(rows, len(ids) // length)
    if rows == 0:
        raise MkdConfigError(f"--text {text} has {len(ids)} tokens, fewer than one row of --length {length}")
    return ids[: rows * length].view(rows, length)


def random_tokens(hf: HFFolder, rows: int, length: int) -> Tensor:
    """[rows, length] int64 random ids of the folder's vocabulary; the same at every call."""
    vocab = hf.config["vocab_size"]
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator("cpu").manual_seed(1), device="cpu")


@torch.no_grad()
def compare(hf: HFFolder, folder: MegatronFolder, tokens: Tensor) -> LogitComparison:
    """Run both models, one after the other, one sequence at a time.

    Args:
        hf: folder of the model that transformers runs.
        folder: checkpoint of the model that megatron runs.
        tokens: [n, s] int64 ids.

    Raises:
        MkdError: a model cannot be built here.
    """
    whole = hf.vision_language
    theirs = load_model(hf.path, hf.flag, whole is not None, dtype=torch.float32, attn_implementation="eager").eval()
    theirs = theirs if whole is None else whole.language_model(theirs)
    expected = [theirs(row[None]).logits[0] for row in tokens]
    del theirs
    vocab = expected[0].shape[-1]
    largest, total, entropies = torch.zeros(()), 0.0, torch.zeros(2, dtype=torch.float64)
    with _megatron_model(folder, tokens.shape[1]) as model:
        positions = torch.arange(tokens.shape[1])[None]
        for row, hf_logits in zip(tokens, expected, strict=True):
            # A GPTModel applies the factor of the logits, but has no softcap.
            megatron_logits = model(row[None], positions, None)[0, :, :vocab]
            if (softcap := model.config.logit_softcap) is not None:
                megatron_logits = softcap * torch.tanh(megatron_logits / softcap)
            error = (megatron_logits - hf_logits).abs()
            largest, total = torch.maximum(largest, error.max()), total + error.double().mean().item()  # keeps NaN
            for n, logits in enumerate((hf_logits, megatron_logits)):
                entropies[n] += torch.nn.functional.cross_entropy(logits[:-1].double(), row[1:])
    perplexities = (entropies / len(tokens)).exp().tolist()
    return LogitComparison(tokens.numel(), largest.item(), total / len(tokens), tuple(perplexities))


@contextlib.contextmanager
def _megatron_model(folder: MegatronFolder, length: int) -> Iterator[GPTModel]:
    """The model of a checkpoint, in fp32 on one rank."""
    shared = default_arguments()
    shared.rank, shared.world_size = 0, 1
    shared.seq_length, shared.params_dtype = length, torch.float32
    shared.padded_vocab_size = folder.args.padded_vocab_size
    set_cpu_values(shared)
    config = gpt_config(teacher_arguments(vars(folder.args), shared, "fp32"))
    config.parallel_output = False
    with one_rank():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        try:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
                chunks = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
            load_megatron_weights(chunks, folder)
            yield unwrap_model(chunks[0]).eval()
        finally:
            parallel_state.destroy_model_parallel()
