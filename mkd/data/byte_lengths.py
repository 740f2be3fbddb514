"""Bytes of text per token, which make losses of different tokenizers comparable (bits per byte)."""

import re

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mkd.utils.json_files import parse_json

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_lengths(tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """[ids] int32 UTF-8 bytes that each token adds to the decoded text; 0 of special tokens and of gaps.

    Computed from the vocabulary's strings, because a part of a character does not decode by itself. Bytes are those of
    the tokenizer's normalized text; most tokenizers of language models do not change the text.

    Returns:
        None unless the vocabulary is byte-level (ByteLevel: GPT-2, Llama 3, Qwen) or has byte tokens for characters
        without a token (ByteFallback: Llama 2, Mistral, Gemma).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    spelling = None if decoder is None else _spelling(parse_json(decoder.__getstate__()))
    if spelling is None:
        return None
    added = tokenizer.added_tokens_decoder
    # A special token that the vocabulary lacks has no id.
    special = set(tokenizer.all_special_ids) - {None} | {id for id, token in added.items() if token.special}
    ids = {id: token for token, id in tokenizer.get_vocab().items() if id not in special}
    lengths = [0] * (max([*ids, *special]) + 1)  # setting elements of a tensor takes several times as long
    for id, token in ids.items():
        if id in added:
            lengths[id] = len(token.encode())
        elif spelling == "ByteLevel":
            lengths[id] = len(token)  # one character per byte
        else:
            lengths[id] = 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
    return torch.tensor(lengths, dtype=torch.int32)


def _spelling(decoder: dict) -> str | None:
    """ByteLevel or ByteFallback if a decoder of the `tokenizers` library is or contains one; else None."""
    return next(
        (step["type"] for step in decoder.get("decoders", [decoder]) if step["type"] in ("ByteLevel", "ByteFallback")),
        None,
    )
