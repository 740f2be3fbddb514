"""Texts of the latest rollouts on disk. A job that was killed learns from them again: a server would write others."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mkd.rollout.engine.sampler import request_key
from mkd.rollout.interface import Decoding, Request
from mkd.utils.atomic_files import write_bytes
from mkd.utils.json_files import parse_json, read_regular

_NAME = re.compile(r"texts_(\d{7,12})\.json")
_TOKEN_BYTES = 12
"""One token id with a comma, and more."""


def rollout_key(iteration: int, requests: Sequence[Request], options: Decoding, scores: np.ndarray) -> str:
    """Hash of all that texts depend on beside a server's random numbers; `scores` stand for the student's weights."""
    stops = () if options.stops is None else options.stops.strings
    values = (iteration, options.tokens, options.temperature, options.top_p, options.true_vocab, stops)
    digest = blake2b(repr((values, sorted(options.end_tokens))).encode() + scores.tobytes(), digest_size=16)
    for request in requests:
        digest.update(request_key(request, options.seed).to_bytes(8, "little"))
    return digest.hexdigest()


@dataclass(frozen=True)
class TextFiles:
    """`texts_XXXXXXX.json`, one per rollout: the number of steps that the student had taken. For the first rank."""

    folder: Path
    keep: int
    """Steps whose rollouts are kept: as many as there are between two checkpoints."""

    def read(self, iteration: int, key: str, count: int, options: Decoding) -> tuple[list[list[int]], int] | None:
        """The texts of a rollout and the steps that the student had taken when it had the weights that wrote them.

        None if there are none, if they are of other prompts, options or weights, or damaged.
        """
        most_bytes = (1 << 16) + _TOKEN_BYTES * count * (options.tokens + 1)
        try:
            values: Any = parse_json(read_regular(self._file(iteration), most_bytes), most_bytes)
            texts, weights_at = values["texts"], values["weights_at"]
            is_whole = values["key"] == key and len(texts) == count and type(weights_at) is int
            is_whole = is_whole and 0 <= weights_at <= iteration
            is_whole = is_whole and all(map(options.may_be_written, texts))
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return (texts, weights_at) if is_whole else None

    def write(self, iteration: int, key: str, texts: Sequence[Sequence[int]], weights_at: int) -> None:
        """Keep the texts of a rollout, and remove older ones.

        Raises:
            OSError: the folder cannot be written.
        """
        values = {"key": key, "weights_at": weights_at, "texts": [list(text) for text in texts]}
        write_bytes(self._file(iteration), json.dumps(values, separators=(",", ":")).encode())
        for path in list(self.folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name is not None and int(name[1]) <= iteration - self.keep and path.is_file():
                path.unlink()

    def _file(self, iteration: int) -> Path:
        return self.folder / f"texts_{iteration:07d}.json"
