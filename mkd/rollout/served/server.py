"""An inference server that writes with the student's weights, which are loaded and compared with the student's own."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mkd.errors import MkdTeacherError
from mkd.rollout.interface import Decoding, Request
from mkd.rollout.served.apis import WritingApi, write_text
from mkd.teacher.inference.apis import score
from mkd.teacher.inference.http import HttpServer, ServerLost
from mkd.teacher.inference.known_text import SAME_NATS
from mkd.utils.logging import logger

_SAME_SHARE = 0.03
"""`SAME_NATS` as a share of the log-probabilities: rounding grows with the logits. bf16 makes 0.023 of it in a
model of random weights whose log-probabilities are -16.5 on average."""
_STEADY = 0.2
"""Share of that difference up to which a server has the weights that it had loaded. Above it they are loaded again."""
_MOVED_NATS = 1e-3
"""Mean difference of the student's log-probabilities above which those of a server must not be bit-equal to before."""
_NOISE, _PART, _GROWTH = 10.0, 0.2, 5.0
"""A server has loaded a part of the weights if its difference from the student is this many times that of the first
weights, and this share of the student's change since then. Rounding grows by the last factor at most, where it is more
than usual at first."""
_OLDER = 0.5
"""A server has older weights of the student if its difference from those is less than this share of its difference from
the present ones. Rounding has no direction: it does not bring scores back to what they were."""
_MOST_LOADS = 4
"""Times that a server may have other weights between two refreshes."""


@dataclass(frozen=True)
class StudentWeights:
    """Weights of the student, and how they are recognized."""

    folder: Path
    """Hugging Face folder."""
    iteration: int
    """Steps that the student had taken."""
    text: tuple[int, ...]
    """A text that servers score."""
    scores: np.ndarray
    """[n - 1] the student's own log-probabilities of its tokens but the first."""

    @property
    def limit(self) -> float:
        """Mean difference of log-probabilities, in nats, up to which others are of the same weights."""
        return max(SAME_NATS, _SAME_SHARE * float(np.abs(self.scores).mean()))


@dataclass
class StudentServer:
    """One server. Not for several threads, except for `write`."""

    server: HttpServer
    api: WritingApi
    model: str
    """The name under which it serves the model."""
    vocab: int
    """The student's vocabulary."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """See `mkd.rollout.served.sharing.Sharer`."""
    _loaded: tuple[StudentWeights, np.ndarray] | None = None
    """The weights that it has loaded, and its own scores of their text then."""
    _loads: int = 0
    """Times that it has loaded these weights."""
    _first: tuple[StudentWeights, float] | None = None
    """The first weights that it has loaded, and the difference of its scores from the student's then: rounding."""
    _changed: tuple[StudentWeights, np.ndarray] | None = None
    """The load since which its scores are bit-equal, and these."""

    def __str__(self) -> str:
        return f"{self.server.flags.url} {self.server}"

    def write(self, request: Request, options: Decoding) -> list[int]:
        """See `write_text`."""
        return write_text(self.api, self.server, self.model, request, options)

    def prepare(self, weights: StudentWeights) -> None:
        """Return when the server has these weights; they are loaded unless it has them already.

        Raises:
            ServerLost: the server does not answer now.
            MkdTeacherError: it cannot load them, or has others afterwards.
        """
        if self._loaded is not None and self._loaded[0] is weights and self._is_steady():
            return
        self._loads = self._loads + 1 if self._loaded is not None and self._loaded[0] is weights else 1
        if self._loads > _MOST_LOADS:
            raise MkdTeacherError(
                f"{self} scores the same text differently each time (by more than {_STEADY * self._limit(weights):.3f} "
                f"nats on average), after it has loaded {weights.folder} {_MOST_LOADS} times: are several servers "
                "behind this address, or does someone else change its weights?"
            )
        self.api.load(self.server, str(weights.folder))
        found = self._scores(weights)
        self._check(weights, found)
        self._loaded = (weights, found)

    def verify(self) -> None:
        """Return if the server still has the weights that it has loaded.

        Raises:
            ServerLost: it does not answer now, or has others: it was started again, for example.
        """
        if not self._is_steady():
            raise ServerLost(f"{self.server} has other weights than it had loaded; they are loaded again")

    def _is_steady(self) -> bool:
        weights, before = self._loaded
        return _mean_distance(self._scores(weights), before) <= _STEADY * self._limit(weights)

    def _scores(self, weights: StudentWeights) -> np.ndarray:
        return score(self.api.scoring, self.server, self.model, weights.text, 1, self.vocab).own_log_probs

    def _check(self, weights: StudentWeights, found: np.ndarray) -> None:
        """Refuse a server whose weights are not the student's."""
        distance, limit = _mean_distance(found, weights.scores), self._limit(weights)
        if not distance <= limit:
            raise MkdTeacherError(
                f"{self} has other weights than the student after it has loaded {weights.folder}: log-probabilities of "
                f"the same text differ by {distance:.3f} nats on average (limit {limit:.3g}); serve the student's own "
                f"model ({self.api.remedy.format(length='N')}), without quantization or adapters"
            )
        if self._first is None:
            logger.info(f"{self}: log-probabilities differ from the student's by {distance:.4f} nats on average")
            self._first, self._changed = (weights, distance), (weights, found)
            return
        since, before = self._changed
        moved = _mean_distance(since.scores, weights.scores)
        if not np.array_equal(before, found):
            self._changed = weights, found
        elif moved > _MOVED_NATS:
            raise MkdTeacherError(
                f"{self} has kept its weights: the student's log-probabilities of the same text have changed by "
                f"{moved:.4f} nats on average since the weights of iteration {since.iteration}, and the server's are "
                f"the same after it has loaded {weights.folder}: does it read the same disk?"
            )
        first, rounding = self._first
        moved = _mean_distance(first.scores, weights.scores)
        if distance > max(_MOVED_NATS, _NOISE * rounding) and distance > _PART * moved:
            raise MkdTeacherError(
                f"{self} has loaded a part of {weights.folder} only: log-probabilities of the same text differ from "
                f"the student's by {distance:.4f} nats on average, and by {rounding:.4f} at the first weights, since "
                f"which the student's have changed by {moved:.4f}; does its log name layers that it has not loaded?"
            )
        for older in (first, self._loaded[0]):
            before = _mean_distance(found, older.scores)
            if distance > _MOVED_NATS and before < _OLDER * distance:
                raise MkdTeacherError(
                    f"{self} has older weights after it has loaded {weights.folder}: log-probabilities of the same "
                    f"text differ from the student's by {distance:.4f} nats on average, and from those of iteration "
                    f"{older.iteration} by {before:.4f}: does it read the same disk?"
                )

    def _limit(self, weights: StudentWeights) -> float:
        """Mean difference up to which its scores are those of the weights: no more than rounding at first explains."""
        if self._first is None:
            return weights.limit
        return max(SAME_NATS, min(weights.limit, _GROWTH * self._first[1]))


def _mean_distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).mean())
