"""Token ids of a text, with the characters that each token covers."""

import json
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from os import PathLike
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from mkd.data.sources.chat import ChatTemplate
from mkd.data.sources.text import require_unicode
from mkd.errors import MkdDataError
from mkd.utils.json_files import parse_json
from mkd.utils.model_folders.pretrained import load_tokenizer

NOT_IN_TEXT = -1
"""Offset of a token that was added before or after a text."""


class Role(IntEnum):
    """Role of a token. An id with several roles, such as an EOS that is also the padding, has the first of them."""

    CONTENT = 0
    EOS = 1
    BOS = 2
    UNK = 3
    PAD = 4
    OTHER = 5
    """Any other special token."""


@dataclass(frozen=True)
class TokenSpans:
    """Tokens of a text, in its order."""

    ids: np.ndarray
    """[n] int32."""
    offsets: np.ndarray
    """[n, 2] int64 (first character, end) of each token in the text before normalization. Tokens may overlap (bytes of
    one character) or leave characters out (whitespace that a tokenizer drops); (NOT_IN_TEXT, NOT_IN_TEXT) for a token
    that was added before or after the text."""
    roles: np.ndarray
    """[n] int8 `Role`."""

    def __len__(self) -> int:
        return len(self.ids)


class SpanTokenizer:
    """A fast Hugging Face tokenizer that returns the offsets of its tokens.

    The ids of a text are those of `tokenizer(text, add_special_tokens=False)`, as in training data; the offsets are
    those before any post-processor trims whitespace from them.
    """

    def __init__(self, source: str | PathLike | PreTrainedTokenizerBase, flag: str = "--tokenizer-model") -> None:
        """Wrap a tokenizer, or read one from a folder.

        Args:
            source: folder or tokenizer.
            flag: flag that named the folder, for messages.

        Raises:
            MkdDataError: there is no tokenizer, or it is slow (has no offsets) or empty.
        """
        is_tokenizer = isinstance(source, PreTrainedTokenizerBase)
        self.tokenizer = source if is_tokenizer else load_tokenizer(str(source), flag)
        self.name = (self.tokenizer.name_or_path or type(self.tokenizer).__name__) if is_tokenizer else str(source)
        self.flag = flag
        if not self.tokenizer.is_fast:
            raise MkdDataError(
                f"{flag} {self.name} is a slow tokenizer, which has no offsets of tokens in a text: convert it to a "
                "tokenizer.json"
            )
        if not len(self.tokenizer):
            raise MkdDataError(f"{flag} {self.name} has no tokens: put the model's tokenizer.json into the folder")
        self._backend = backend_of(self.description)
        self._check_ids()
        self._backend.encode_special_tokens = self.tokenizer.split_special_tokens

    def _check_ids(self) -> None:
        """Every token has an id of its own, as the alignment and the projection require."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if len(set(vocabulary.values())) < len(vocabulary):
            tokens: dict[int, str] = {}
            pairs = ((tokens.setdefault(number, token), token, number) for token, number in vocabulary.items())
            first, second, number = next(found for found in pairs if found[0] != found[1])
            raise MkdDataError(
                f"{self.flag} {self.name} gives the id {number} to the tokens {first!r} and {second!r}: take its "
                "tokenizer.json from its source again"
            )
        if (largest := max(self.tokenizer.get_vocab().values())) >= self.size:
            raise MkdDataError(
                f"{self.flag} {self.name} has a token with the id {largest}, but its tokenizer.json has {self.size} "
                "ids: take the folder from its source again"
            )

    @cached_property
    def description(self) -> dict[str, Any]:
        """Content of a tokenizer.json, without truncation, padding and post-processor."""
        content = parse_json(self.tokenizer.backend_tokenizer.to_str())
        return {**content, "truncation": None, "padding": None, "post_processor": None}

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def role_of_id(self) -> np.ndarray:
        """[size] int8 `Role`."""
        roles = np.full(self.size, Role.CONTENT, dtype=np.int8)
        for number, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                roles[number] = Role.OTHER
        for role in (Role.PAD, Role.UNK, Role.BOS, Role.EOS):  # the first roles last, so that they win
            numbers = [getattr(self.tokenizer, f"{role.name.lower()}_token_id")]
            if role == Role.UNK:
                numbers.append(self._unknown_of_model)
            for number in numbers:
                if number is not None:
                    roles[number] = role
        return roles

    @property
    def _unknown_of_model(self) -> int | None:
        """Id of the model's unknown token, which the tokenizer may not declare."""
        model = self.description["model"]
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self._backend.token_to_id(token)

    @cached_property
    def hash(self) -> str:
        """128-bit hex hash; tokenizers with equal hashes give all texts the same ids, and ids the same roles."""
        parts = [self.description, self.role_of_id.tolist()]
        return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    @cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer by default adds its beginning-of-sequence token to a text."""
        return self.tokenizer("a", verbose=False)["input_ids"][:1] == [self.tokenizer.bos_token_id]

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer with its chat template. Raises MkdDataError if there is none."""
        return ChatTemplate(self.tokenizer, self.name, self.flag)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> TokenSpans:
        """Tokenize a text.

        Args:
            text: names of special tokens in it become special tokens, as everywhere else.
            bos, eos: add the beginning- or end-of-sequence token.

        Raises:
            MkdDataError: the text has half a surrogate pair, or the tokenizer has no such token to add.
        """
        require_unicode(text, "text")
        coded = self._backend.encode(text, add_special_tokens=False)
        before, after = [self._special("bos")] if bos else [], [self._special("eos")] if eos else []
        ids = np.array([*before, *coded.ids, *after], dtype=np.int32)
        offsets = np.full((len(ids), 2), NOT_IN_TEXT, dtype=np.int64)
        offsets[len(before) : len(ids) - len(after)] = np.array(coded.offsets, dtype=np.int64).reshape(-1, 2)
        roles = self.role_of_id[ids]
        roles[: len(before)], roles[len(ids) - len(after) :] = Role.BOS, Role.EOS  # BOS and EOS may be the same id
        return TokenSpans(ids, offsets, roles)

    def _special(self, name: str) -> int:
        number = getattr(self.tokenizer, f"{name}_token_id")
        if number is None:
            raise MkdDataError(
                f"{self.flag} {self.name} has no {name}_token to add to a text: set one in its tokenizer_config.json"
            )
        return number


def backend_of(description: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer that the content of a tokenizer.json describes."""
    return Tokenizer.from_str(json.dumps(description))
