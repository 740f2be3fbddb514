"""Strings that end a written text (--kd-rollout-stop)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers.decoders import WordPiece
from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_FURTHER = 3
"""Tokens before the window that may belong to its first character."""


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text, found in its decoded tokens."""

    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    def first_end(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """The number of new tokens up to the first one that completes a string in the text `before` + `new`; None if
        none does."""
        before = before[-self._window - _FURTHER :]
        # One text in place of one per token. A text with U+FFFD may lack a string that a part of it has, see `end`.
        text = self._text([*before, *new])
        if not self._are_in(text) and _REPLACEMENT not in text:
            return None
        return next((n for n in range(1, len(new) + 1) if self.end([*before, *new[:n]])), None)

    def end(self, tokens: Sequence[int]) -> bool:
        """True if the text ends with or in a token that completes one of the strings."""
        # Decoders of byte tokens write U+FFFD for all bytes in a row if the first ones are the end of a character. The
        # first byte of a character is among four in a row.
        for count in range(self._window, self._window + _FURTHER + 1):
            text = self._text(tokens[-count:])
            if self._are_in(text):
                return True
            if _REPLACEMENT not in text:
                break
        return False

    def _text(self, tokens: Sequence[int]) -> str:
        """The text of tokens from the middle of a text, with all spaces, as servers compare it."""
        text = self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text.removeprefix(self._mark_of_parts)

    @cached_property
    def _mark_of_parts(self) -> str:
        """Beginning of WordPiece tokens that continue a word, which is no text but is decoded in the first token."""
        decoder = self.tokenizer.backend_tokenizer.decoder if self.tokenizer.is_fast else None
        return decoder.prefix if isinstance(decoder, WordPiece) else ""

    @property
    def _window(self) -> int:
        """Tokens that are sufficient for each string: a token has a byte at least; one more, because decoding may drop
        a space at the beginning."""
        return max(len(text.encode()) for text in self.strings) + 1

    def _are_in(self, text: str) -> bool:
        return any(string in text for string in self.strings)
