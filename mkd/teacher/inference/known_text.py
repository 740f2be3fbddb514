"""A text by which the weights of a teacher are recognized: its scores at first, and a file that keeps them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkd.errors import MkdCacheError, MkdTeacherError
from mkd.teacher.inference.scores import TokenScores
from mkd.utils.atomic_files import write_bytes
from mkd.utils.json_files import read_json

NAME = ".known_text.json"
"""Name of the file, in the folders of --kd-teacher-cache and --save."""
SAME_NATS = 0.1
"""Mean difference of log-probabilities up to which two answers are those of the same weights. Rounding in bf16, other
kernels and other batches make up to about 0.03."""
_LONGEST = 1000


@dataclass(frozen=True)
class KnownText:
    """A text with the scores that the teacher gave it at first."""

    text: tuple[int, ...]
    scores: TokenScores

    def check(self, scores: TokenScores, origin: str, since: str) -> None:
        """Refuse scores of other weights.

        Args:
            scores: of this text, now.
            origin: where they come from, for messages.
            since: the time or place of the scores that are known, for messages.
        """
        distance = self.scores.distance(scores)
        if not distance <= SAME_NATS:
            raise MkdTeacherError(
                f"{origin} is another teacher than {since}: log-probabilities of the same text differ by "
                f"{distance:.3f} nats on average; serve the weights of before, or start a new run (and a new "
                "--kd-teacher-cache)"
            )


@dataclass(frozen=True)
class KnownTextFile:
    """The known text of a folder."""

    flag: str
    folder: Path

    @property
    def origin(self) -> str:
        """The teacher that filled the folder, for messages."""
        return f"that of {self.flag} {self.folder}"

    def read(self) -> KnownText | None:
        """The known text; None if there is no file.

        Raises:
            MkdCacheError: the file is damaged.
        """
        path = self.folder / NAME
        if not path.exists():
            return None
        try:
            values = read_json(path)
            text, own = tuple(values["text"]), np.array(values["log_probs"], dtype=np.float64)
            if not all(type(one) is int and one >= 0 for one in text) or own.shape != (len(text) - 1,):
                raise ValueError("other numbers")
            if not 1 < len(text) <= _LONGEST or not np.isfinite(own).all():
                raise ValueError("of another length, or not finite")
        except (ValueError, LookupError, TypeError, OverflowError, OSError) as error:
            raise MkdCacheError(f"{self.flag} {self.folder}: {NAME} is damaged ({error}): remove it") from None
        nothing = np.zeros((len(own), 0))
        return KnownText(text, TokenScores(nothing, nothing, own))

    def require_beside(self, answers: Sequence[Path]) -> None:
        """Refuse a folder that has lost the file, whose name begins with a dot, but not the answers of its teacher.

        Raises:
            MkdCacheError: see above; or the file is damaged.
        """
        if answers and self.read() is None:
            raise MkdCacheError(
                f"{self.flag} {self.folder} has answers of a server, but no {NAME}, by which its weights are "
                "recognized: copy that file from the cache that this one was copied or merged from, or give a new "
                "folder"
            )

    def write(self, known: KnownText) -> None:
        """Replace the file.

        Raises:
            OSError: the folder cannot be written.
        """
        values = {"text": list(known.text), "log_probs": known.scores.own_log_probs.tolist()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(self.folder / NAME, json.dumps(values).encode())


def known_text_of(files: Sequence[KnownTextFile]) -> KnownText | None:
    """The known text of some folders that must have the answers of one teacher; None if none of them has one.

    Raises:
        MkdCacheError: a file is damaged, or two have different texts.
        MkdTeacherError: two are of different teachers.
    """
    found = [(file, known) for file in files if (known := file.read()) is not None]
    for file, known in found[1:]:
        first, before = found[0]
        if known.text != before.text:
            raise MkdCacheError(
                f"{file.flag} {file.folder} and {first.flag} {first.folder} have other texts in {NAME}: whether their "
                "teachers are the same is not known"
            )
        before.check(known.scores, file.origin, first.origin)
    return found[0][1] if found else None
