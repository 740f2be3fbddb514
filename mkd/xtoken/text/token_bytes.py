"""What the tokens of a vocabulary spell, in bytes, so that vocabularies of different kinds can be compared.

Kinds of tokenizers spell the same text differently: a word after a space is `Ġthe` in a byte-level vocabulary, `▁the`
in one made by SentencePiece, and `the` in WordPiece, where `##the` is the word's continuation. Decoding single tokens
does not tell (SentencePiece drops a leading space), so the spelling is read from the tokenizer's description.
"""

import json
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
    """[size] None for special tokens and numbers without a token."""
    is_fallback: np.ndarray
    """[size] bool: a byte that stands in for text without a token of its own."""
    pieces: Callable[[list[bytes]], list[list[int]]]
    """Ids by which the tokenizer writes each surface in the middle of a text; none where it cannot."""


def read_token_bytes(tokenizer: SpanTokenizer) -> TokenBytes:
    """Read the surfaces of all tokens.

    Raises:
        MkdConfigError: the tokenizer marks the ends of words or continuations in a way that is not known here.
    """
    description = tokenizer.description
    model = description["model"]
    types = {node["type"] for node in _nodes(description)}
    is_word_piece = model["type"] == "WordPiece"
    marks = [model.get("end_of_word_suffix"), None if is_word_piece else model.get("continuing_subword_prefix")]
    if any(marks):
        raise MkdConfigError(
            f"{tokenizer.flag} {tokenizer.name} marks parts of words with {next(filter(None, marks))!r}, and "
            "projections read byte-level, SentencePiece and WordPiece vocabularies: use a tokenizer of these kinds"
        )
    if "ByteLevel" in types:
        spell = _spell_bytes
    elif is_word_piece:
        spell = _word_piece_speller(model["continuing_subword_prefix"])
    else:
        spell = _spell_metaspace
    of_id, is_fallback = _spelled(tokenizer, spell, bool(model.get("byte_fallback")))
    if is_word_piece:
        return TokenBytes(of_id, is_fallback, _LongestMatch(tokenizer, of_id))
    return TokenBytes(of_id, is_fallback, _Encoder(tokenizer, of_id, is_fallback, "ByteLevel" in types))


def _spelled(
    tokenizer: SpanTokenizer, spell: Callable[[str], bytes], byte_fallback: bool
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
            of_id[number] = spell(token) or None
    return of_id, is_fallback


def _nodes(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Normalizers, pre-tokenizers and decoders, also those inside of sequences."""
    waiting = [description.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            waiting += [inner for key in _NESTED for inner in node.get(key, [])]


def _byte_characters() -> list[str]:
    """The character that byte-level vocabularies write for each byte (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [characters[byte] for byte in range(256)]


_CHARACTERS = _byte_characters()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


def _spell_bytes(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _spell_metaspace(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _word_piece_speller(prefix: str) -> Callable[[str], bytes]:
    """Words come after a space; punctuation and ideographs may or may not, and are spelled without."""

    def spell(token: str) -> bytes:
        if token.startswith(prefix) and token != prefix:
            return token.removeprefix(prefix).encode()
        is_word = token[:1].isalnum() and not any(low <= ord(token[0]) <= high for low, high in _IDEOGRAPHS)
        return (" " + token if is_word else token).encode()

    return spell


class _Encoder:
    """Writes surfaces with the tokenizer itself, kept from adding or dropping a space at the beginning."""

    def __init__(
        self, tokenizer: SpanTokenizer, of_id: list[bytes | None], is_fallback: np.ndarray, byte_level: bool
    ) -> None:
        self.backend = _without_prefix(tokenizer.description)
        self.unknown = set(np.flatnonzero(tokenizer.role_of_id == Role.UNK).tolist())
        self.fallback = {of_id[number]: int(number) for number in np.flatnonzero(is_fallback)}
        self.byte_level = byte_level

    def __call__(self, surfaces: list[bytes]) -> list[list[int]]:
        texts = [_text(surface) for surface in surfaces]
        coded = iter(self.backend.encode_batch([t for t in texts if t is not None], add_special_tokens=False))
        pieces = [
            self._raw(surface) if text is None else next(coded).ids
            for surface, text in zip(surfaces, texts, strict=True)
        ]
        return [[] if self.unknown.intersection(ids) else ids for ids in pieces]

    def _raw(self, surface: bytes) -> list[int]:
        """Bytes that are not text: a part of a character."""
        if self.byte_level:
            return [token.id for token in self.backend.model.tokenize("".join(_CHARACTERS[byte] for byte in surface))]
        ids = [self.fallback.get(bytes([byte])) for byte in surface]
        return [] if None in ids else ids


def _text(surface: bytes) -> str | None:
    try:
        return surface.decode()
    except UnicodeDecodeError:
        return None


def _without_prefix(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer without what it does only at the beginning of a text, or to text that looks like special tokens."""
    content = json.loads(json.dumps(description))
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = _kept(content[part])
    backend = backend_of(content)
    backend.encode_special_tokens = True
    return backend


def _kept(node: dict[str, Any] | None) -> dict[str, Any] | None:
    if node is None or node["type"] in ("Prepend", "Strip", "WhitespaceSplit"):
        return None
    if node["type"] == "Metaspace":
        node = {**node, "prepend_scheme": "never"}
    elif node["type"] == "ByteLevel" and "add_prefix_space" in node:
        node = {**node, "add_prefix_space": False}
    for key in _NESTED:
        if key in node:
            node = {**node, key: [kept for inner in node[key] if (kept := _kept(inner))]}
    return node


class _LongestMatch:
    """WordPiece's rule on surfaces: the longest token first. The tokenizer itself would begin a word anew."""

    def __init__(self, tokenizer: SpanTokenizer, of_id: list[bytes | None]) -> None:
        self.normalizer = backend_of(tokenizer.description).normalizer
        self.id_of: dict[bytes, int] = {}
        for number, surface in enumerate(of_id):
            if surface is not None:
                self.id_of.setdefault(surface, number)
        self.longest = max(map(len, self.id_of))

    def __call__(self, surfaces: list[bytes]) -> list[list[int]]:
        return [self._one(surface) for surface in surfaces]

    def _one(self, surface: bytes) -> list[int]:
        text = _text(surface)
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
