"""Bytes of every token of a vocabulary, so that vocabularies of different kinds can be compared.

Tokenizers write the same text differently: a word after a space is `Ġthe` in a byte-level vocabulary, `▁the` in one
made by SentencePiece, and `the` in WordPiece, where `##the` continues a word. Decoding single tokens is not enough
(SentencePiece drops a leading space), so the bytes are computed from the tokenizer's description.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mkd.errors import MkdConfigError
from mkd.xtoken.text.tokens import Role, SpanTokenizer, backend_of

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NESTED = ("pretokenizers", "normalizers", "decoders")
_IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2FA1F))


@dataclass(frozen=True)
class TokenBytes:
    """The vocabulary of one tokenizer as bytes."""

    of_id: list[bytes | None]
    """[size] bytes of each token; None for special tokens and unused ids."""
    is_fallback: np.ndarray
    """[size] bool, True for byte tokens that encode characters without a token (ByteFallback)."""
    encode: Callable[[list[bytes]], list[list[int]]]
    """Token ids that the tokenizer encodes each byte string to in the middle of a text; empty if it cannot."""


def read_token_bytes(tokenizer: SpanTokenizer) -> TokenBytes:
    """Compute the bytes of all tokens.

    Raises:
        MkdConfigError: the tokenizer marks ends of words or continuations in an unsupported way.
    """
    description = tokenizer.description
    model = description["model"]
    types = {node["type"] for node in _nodes(description)}
    is_word_piece = model["type"] == "WordPiece"
    marks = [model.get("end_of_word_suffix"), None if is_word_piece else model.get("continuing_subword_prefix")]
    if any(marks):
        raise MkdConfigError(
            f"{tokenizer.flag} {tokenizer.name} marks parts of words with {next(filter(None, marks))!r}, and "
            "projections support byte-level, SentencePiece and WordPiece vocabularies: use a tokenizer of these kinds"
        )
    if "ByteLevel" in types:
        to_bytes = _byte_level_bytes
    elif is_word_piece:
        to_bytes = _word_piece_bytes(model["continuing_subword_prefix"])
    else:
        to_bytes = _metaspace_bytes
    of_id, is_fallback = _vocabulary_bytes(tokenizer, to_bytes, bool(model.get("byte_fallback")))
    if is_word_piece:
        return TokenBytes(of_id, is_fallback, _LongestMatch(tokenizer, of_id))
    return TokenBytes(of_id, is_fallback, _Encoder(tokenizer, of_id, is_fallback, "ByteLevel" in types))


def _vocabulary_bytes(
    tokenizer: SpanTokenizer, to_bytes: Callable[[str], bytes], byte_fallback: bool
) -> tuple[list[bytes | None], np.ndarray]:
    of_id: list[bytes | None] = [None] * tokenizer.size
    is_fallback = np.zeros(tokenizer.size, dtype=bool)
    added = tokenizer.tokenizer.added_tokens_decoder
    for token, number in tokenizer.tokenizer.get_vocab().items():
        byte = _BYTE.fullmatch(token) if byte_fallback else None
        if tokenizer.role_of_id[number] != Role.CONTENT:
            continue
        if number in added:
            of_id[number] = token.encode()
        elif byte:
            of_id[number], is_fallback[number] = bytes([int(byte[1], 16)]), True
        else:
            of_id[number] = to_bytes(token) or None
    return of_id, is_fallback


def _nodes(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All normalizers, pre-tokenizers and decoders, those inside sequences included."""
    waiting = [description.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            waiting += [inner for key in _NESTED for inner in node.get(key, [])]


def _byte_characters() -> list[str]:
    """Character of each byte in byte-level vocabularies (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [characters[byte] for byte in range(256)]


_CHARACTERS = _byte_characters()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


def _byte_level_bytes(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _metaspace_bytes(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _word_piece_bytes(prefix: str) -> Callable[[str], bytes]:
    """Bytes of WordPiece tokens: words with a leading space, punctuation and ideographs without one."""

    def to_bytes(token: str) -> bytes:
        if token.startswith(prefix) and token != prefix:
            return token.removeprefix(prefix).encode()
        is_word = token[:1].isalnum() and not any(low <= ord(token[0]) <= high for low, high in _IDEOGRAPHS)
        return (" " + token if is_word else token).encode()

    return to_bytes


class _Encoder:
    """Encodes byte strings with the tokenizer itself, modified to neither add nor drop a space at the beginning."""

    def __init__(
        self, tokenizer: SpanTokenizer, of_id: list[bytes | None], is_fallback: np.ndarray, byte_level: bool
    ) -> None:
        self.backend = _without_prefix(tokenizer.description)
        self.unknown = set(np.flatnonzero(tokenizer.role_of_id == Role.UNK).tolist())
        self.fallback = {of_id[number]: int(number) for number in np.flatnonzero(is_fallback)}
        self.byte_level = byte_level

    def __call__(self, strings: list[bytes]) -> list[list[int]]:
        texts = [_text(string) for string in strings]
        coded = iter(self.backend.encode_batch([t for t in texts if t is not None], add_special_tokens=False))
        encoded = [
            self._raw(string) if text is None else next(coded).ids for string, text in zip(strings, texts, strict=True)
        ]
        return [[] if self.unknown.intersection(ids) else ids for ids in encoded]

    def _raw(self, string: bytes) -> list[int]:
        """Encode bytes that are not valid UTF-8, such as a part of a character."""
        if self.byte_level:
            return [token.id for token in self.backend.model.tokenize("".join(_CHARACTERS[byte] for byte in string))]
        ids = [self.fallback.get(bytes([byte])) for byte in string]
        return [] if None in ids else ids


def _text(string: bytes) -> str | None:
    """Decode UTF-8; None if it is not valid."""
    try:
        return string.decode()
    except UnicodeDecodeError:
        return None


def _without_prefix(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer without its special treatment of the beginning of a text and of names of special tokens."""
    content = copy.deepcopy(description)
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = _for_middle_of_text(content[part])
    backend = backend_of(content)
    backend.encode_special_tokens = True
    return backend


def _for_middle_of_text(node: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that does not change the beginning of a text; None if nothing is left of it."""
    if node is None or node["type"] in ("Prepend", "Strip", "WhitespaceSplit"):
        return None
    if node["type"] == "Metaspace":
        node = {**node, "prepend_scheme": "never"}
    elif node["type"] == "ByteLevel" and "add_prefix_space" in node:
        node = {**node, "add_prefix_space": False}
    for key in _NESTED:
        if key in node:
            node = {**node, key: [kept for inner in node[key] if (kept := _for_middle_of_text(inner))]}
    return node


class _LongestMatch:
    """WordPiece's rule on bytes: longest token first. The tokenizer itself would start a new word."""

    def __init__(self, tokenizer: SpanTokenizer, of_id: list[bytes | None]) -> None:
        self.normalizer = backend_of(tokenizer.description).normalizer
        self.id_of: dict[bytes, int] = {}
        for number, string in enumerate(of_id):
            if string is not None:
                self.id_of.setdefault(string, number)
        self.longest = max(map(len, self.id_of))

    def __call__(self, strings: list[bytes]) -> list[list[int]]:
        return [self._encode(string) for string in strings]

    def _encode(self, string: bytes) -> list[int]:
        text = _text(string)
        if text is None or not text.strip():
            return []
        rest = (self.normalizer.normalize_str(text) if self.normalizer else text).encode()
        ids = []
        while rest:
            size = next((n for n in range(min(self.longest, len(rest)), 0, -1) if rest[:n] in self.id_of), 0)
            if size:
                ids.append(self.id_of[rest[:size]])
            elif not rest[:1].isspace():
                return []
            rest = rest[max(size, 1) :]
        return ids
