"""Strings that end a written text (--kd-rollout-stop)."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text, found in its decoded tokens."""

    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    def end(self, tokens: Sequence[int]) -> bool:
        """True if the text ends with or in a token that completes one of the strings."""
        # Each token has a byte at least; one more, because decoding may drop a space at the beginning.
        window = max(len(text.encode()) for text in self.strings) + 1
        # Decoders of byte tokens write U+FFFD for all bytes in a row if the first ones are the end of a character. The
        # first byte of a character is among four in a row.
        for count in range(window, window + 4):
            text = self.tokenizer.decode(tokens[-count:])
            if any(string in text for string in self.strings):
                return True
            if _REPLACEMENT not in text:
                break
        return False

    def are_in(self, tokens: Sequence[int]) -> bool:
        """True if one of the strings is in the text."""
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)
