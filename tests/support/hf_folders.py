"""Tiny random models in Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.staged_reads import Staging

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling factor differs from Megatron's default of 8."""

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""Uneven sizes: the vocabulary is not a multiple of 128, and heads times head_dim is not the hidden width."""


def make_llama(folder: Path, shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """Save a random Llama model; see `make_model`."""
    return make_model(folder, "llama", shard_size, dtype, **sizes)


def make_model(
    folder: Path, model_type: str, shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Path:
    """Save a random model with large weights and uneven norms, so that a misplaced tensor changes the logits."""
    generator = torch.Generator().manual_seed(20)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **sizes}))
    with torch.no_grad():
        for param in model.parameters():
            low = 0.5 if param.dim() == 1 else -0.5
            param.uniform_(low, low + 1.0, generator=generator)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.uniform_(-0.5, 0.5, generator=generator)
    model.to(dtype)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # stored in fp32 with weights of any dtype
            module.e_score_correction_bias.data = module.e_score_correction_bias.data.float()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


class CountingFolder(HFFolder):
    """A folder that counts the bytes of tensors that are read."""

    bytes_read = 0

    def read(
        self, name: str, rows: slice | None = None, cols: slice | None = None, staging: Staging | None = None
    ) -> Tensor:
        block = super().read(name, rows, cols, staging)
        self.bytes_read += block.nbytes
        return block


def add_tokenizer(folder: Path, words: list[str]) -> None:
    """Write a word-level tokenizer.json."""
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)})).save(str(folder / "tokenizer.json"))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the safetensors library."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    return weights


def change_weights(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a single-file folder."""
    weights = read_weights(folder) | changes
    save_file({name: t for name, t in weights.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})


def change_json(file: Path, changes: dict[str, Any]) -> None:
    """Replace, add or (None) remove keys of a JSON object."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@torch.no_grad()
def reference_logits(folder: Path, tokens: Tensor) -> Tensor:
    """[b, s, V] fp32 logits of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(tokens).logits
