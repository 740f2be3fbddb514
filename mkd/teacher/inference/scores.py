"""Log-probabilities that an inference server returns for a text, checked, as targets of the record format."""

from dataclasses import dataclass

import numpy as np

from mkd.errors import MkdNumericError, MkdTeacherError
from mkd.teacher.cache.record_format import TokenTargets

_ROUNDING = 2e-2
"""Nats by which two log-probabilities of one token may differ in one answer, because a server may round them."""
_EXCESS = 2e-3
"""A sum of probabilities may exceed 1 by this."""

_PADDING = 2
"""A server may have this many times the tokens of the job's vocabulary: rows of padding have a probability, too."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of each token of a text but its first, whose probability no prefix determines."""

    top_ids: np.ndarray
    """[n, K] int64: the K most probable tokens at the position of each token."""
    top_log_probs: np.ndarray
    """[n, K] float64: their log-probabilities, in descending order."""
    own_log_probs: np.ndarray
    """[n] float64: those of the tokens themselves."""

    def check(self, text: np.ndarray, vocab: int, origin: str) -> None:
        """Refuse scores that are not the log-probabilities of a model with this vocabulary.

        Args:
            text: [n + 1] the token ids that were sent.
            vocab: size of the vocabulary.
            origin: the server, for messages.

        Raises:
            MkdNumericError: a value is not finite.
            MkdTeacherError: anything else.
        """
        ids, top, own = self.top_ids, self.top_log_probs, self.own_log_probs
        if not (np.isfinite(top).all() and np.isfinite(own).all()):
            raise MkdNumericError(
                f"{origin} answers with log-probabilities that are not finite: the weights of its model are damaged, "
                "or it overflows in its precision"
            )
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab:
            raise MkdTeacherError(
                f"{origin} answers with token {ids.max()}, but the vocabulary of this job has {vocab} tokens: is "
                "another model served there?"
            )
        ordered = np.sort(ids, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise MkdTeacherError(f"{origin} answers with a token twice among the most probable ones of a position")
        if (np.diff(top, axis=1) > _ROUNDING).any() or np.exp(top).sum(axis=1).max(initial=0.0) > 1.0 + _EXCESS:
            raise MkdTeacherError(
                f"{origin} answers with numbers that are not log-probabilities in descending order: its answers must "
                "be those of the model, without a processor of logits (vLLM: --logprobs-mode raw_logprobs)"
            )
        self._check_rest(vocab, origin)
        is_own = ids == text[1:, None]
        among, outside = is_own.any(axis=1), top.min(axis=1, initial=np.inf) + _ROUNDING
        listed = np.where(is_own, top, 0.0).sum(axis=1)
        if (among & (np.abs(listed - own) > _ROUNDING)).any() or (~among & (own > outside)).any():
            raise MkdTeacherError(
                f"{origin} answers with a log-probability of the text's own token that contradicts the most probable "
                "ones: its entries belong to other tokens than those that were sent"
            )

    def _check_rest(self, vocab: int, origin: str) -> None:
        """Refuse numbers with which no distribution adds up to 1: none of the other tokens is more probable than the
        last listed one."""
        if not self.top_log_probs.size:
            return
        last = np.exp(self.top_log_probs.min(axis=1) + _ROUNDING)
        lacking = 1.0 - np.exp(self.top_log_probs + _ROUNDING).sum(axis=1) - _PADDING * vocab * last
        if lacking.max() > 0.0:
            listed = self.top_log_probs[lacking.argmax()]
            raise MkdTeacherError(
                f"{origin} answers with {listed.max():.2f} to {listed.min():.2f} for the most probable tokens of a "
                f"position, which are not log-probabilities: the other ones of {vocab} tokens are too few to make up "
                "for what these lack (vLLM: --logprobs-mode raw_logprobs)"
            )

    def targets(self) -> TokenTargets:
        """Targets of the n tokens before each scored one: its log-probabilities are what the model predicts there."""
        return TokenTargets(
            self.top_ids.astype(np.int32),
            self.top_log_probs.astype(np.float32),
            np.zeros((len(self.top_ids), 1), dtype=np.float32),
            self.own_log_probs.astype(np.float32),
        )

    def distance(self, other: "TokenScores") -> float:
        """Mean difference of the log-probabilities of the text's own tokens, in nats."""
        return float(np.abs(self.own_log_probs - other.own_log_probs).mean())
