"""Tensors of one row from the pieces that the plan puts into it: token ids, labels (shifted here), masks, positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowLayout:
    """Layout of pieces in a row."""

    row_length: int
    multiple: int
    """Each piece in a packed row is padded to a multiple of it, the same for all parallel layouts, so that all of them
    train on the same rows."""
    is_packed: bool
    """True if a row holds several pieces, with segment bounds; else a row has one piece."""
    kd_everywhere: bool
    """True if the divergence is taken on every token of a text; else on the supervised ones alone."""
    longest: int | None = None
    """Positions of the models, if a packed row may have more; None: those of a row."""
    longest_of: str = "a model"
    """The model with so few positions, for messages."""

    @property
    def piece_length(self) -> int:
        """Most positions of a piece: those of a row, and at most the models' own, with the padding behind it."""
        if self.longest is None or self.longest >= self.row_length:
            return self.row_length
        return self.longest // self.multiple * self.multiple

    @property
    def is_limited(self) -> bool:
        """True if a model has fewer positions than a row."""
        return self.piece_length < self.row_length

    @property
    def limit(self) -> str:
        """The length of the longest piece, for messages."""
        if not self.is_limited:
            return "a row"
        rounded = "" if self.piece_length == self.longest else f" ({self.longest}, in multiples of {self.multiple})"
        return f"the {self.piece_length} positions of {self.longest_of}{rounded}"

    def starts(self, positions: Sequence[int]) -> list[int]:
        """Starts of pieces with these numbers of positions in a row, and the start of a piece that would follow."""
        units = -(-np.asarray(positions, dtype=np.int64) // self.multiple)
        return [0, *(self.multiple * np.cumsum(units)).tolist()]

    def row(self, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        """Lay pieces one after the other.

        Each is padded behind its text. The rest of the row is a segment of padding alone. Padding has id 0 and is
        masked by position, never by id: a text may end with the tokenizer's padding token.

        Args:
            texts: for each piece the ids ([positions + 1] integers) and the supervised targets or their weights
                ([positions + 1] bool or float32).

        Returns:
            tokens, labels [s] int64, ce_mask, kd_mask [s] fp32, position_ids [s] int64; and when packed
            cu_seqlens_padded, cu_seqlens [s / multiple + 1] int32 (starts of the segments in the row; sums of their
            lengths without padding; the last bound is repeated to the full length, so that rows collate) and
            max_seqlen (int64, positions of the longest segment); otherwise length (int64, positions of the text).
        """
        size = self.row_length
        row = {
            "tokens": np.zeros(size, dtype=np.int64),
            "labels": np.zeros(size, dtype=np.int64),
            "ce_mask": np.zeros(size, dtype=np.float32),
            "kd_mask": np.zeros(size, dtype=np.float32),
            "position_ids": np.arange(size, dtype=np.int64),
        }
        counts = [len(ids) - 1 for ids, _ in texts]
        padded, real = [*self.starts(counts)], [0, *np.cumsum(counts).tolist()]
        for (ids, supervised), start, count in zip(texts, padded, counts, strict=False):
            text = slice(start, start + count)
            row["tokens"][text], row["labels"][text] = ids[:-1], ids[1:]
            row["ce_mask"][text] = supervised[1:]
            row["kd_mask"][text] = 1.0 if self.kd_everywhere else supervised[1:]
        if not self.is_packed:
            row["length"] = np.int64(real[-1])
            return row
        if padded[-1] < size:
            padded.append(size)
            real.append(real[-1])
        row["position_ids"] -= np.repeat(padded[:-1], np.diff(padded))
        bounds = size // self.multiple + 1
        row["cu_seqlens_padded"] = np.array(padded + [size] * (bounds - len(padded)), dtype=np.int32)
        row["cu_seqlens"] = np.array(real + [real[-1]] * (bounds - len(real)), dtype=np.int32)
        row["max_seqlen"] = np.int64(np.max(np.diff(row["cu_seqlens_padded"])))
        return row
