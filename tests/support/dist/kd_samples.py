"""The samples of the steps that tests compare between layouts: collated, dealt to ranks, and the same for every layout.

`text`: rows without padding. `padded` and `packed`: the same short texts, one a row behind which the row is padded, or
several a row, each padded to what context parallelism needs. Lengths are odd, 1 and the whole row; masks have holes;
one row, and one text in the middle of a row, has no supervised token.

Masks of `text`, whose rows have no padding, may be others. `differ`: distillation has its own. `kd for both`: both
terms have that one. `no kd`, `no ce`: one of the masks is empty. `uneven`: masks differ, and some data- and
context-parallel ranks have no token with cross-entropy, or none at all. `fractions`: weights of 1/3, 2/3 and 1, which
depend on the token, for both terms.
"""

import itertools
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import default_collate

from tests.support.dist import kd_pairs

DataName = Literal["text", "padded", "packed", "pairs", "packed pairs", "few pairs"]
MaskName = Literal["same", "differ", "uneven", "kd for both", "no kd", "no ce", "every token", "one token", "fractions"]
ROW, VOCAB = 24, 83
ROWS = 8
TEXTS = [[24], [1, 5, 3], [15, 7], [8, 3], [23], [2, 7, 6], [5, 1], [16, 8]]
"""Tokens of the texts of each packed row: fewer than the row has, even where each is padded to a multiple of 8."""


def _text(length: int, generator: torch.Generator, supervised: bool = True) -> dict[str, Tensor]:
    """One text of `length` tokens that have a next one."""
    tokens = torch.randint(0, VOCAB, (length + 1,), generator=generator)
    mask = (torch.rand(length, generator=generator) < 0.7).float()
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": mask if supervised else torch.zeros(length),
        "position_ids": torch.arange(length),
    }


def _padded(text: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The text with zeros behind it. Token 0 is an ordinary token: only the masks keep padding out of the loss."""
    missing = length - len(text["tokens"])
    return {name: torch.nn.functional.pad(value, (0, missing)) for name, value in text.items()}


def _packed_row(texts: list[dict[str, Tensor]], multiple: int) -> dict[str, Tensor]:
    """Texts in one row, each padded to a multiple; what is left of the row is a segment of its own."""
    lengths = [len(text["tokens"]) for text in texts]
    padded = [-(-length // multiple) * multiple for length in lengths]
    if sum(padded) < ROW:
        texts, lengths, padded = [*texts, _text(0, torch.Generator())], [*lengths, 0], [*padded, ROW - sum(padded)]
    parts = [_padded(text, length) for text, length in zip(texts, padded, strict=True)]
    bounds = {"cu_seqlens": lengths, "cu_seqlens_padded": padded}
    row = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for name, sizes in bounds.items():
        ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        row[name] = torch.tensor(ends + ends[-1:] * (8 - len(ends)), dtype=torch.int32)
    return row


def samples(data: DataName, cp: int) -> list[dict[str, Tensor]]:
    """All samples of the step, one a row; those that are packed are padded for `cp` context-parallel ranks."""
    if "pairs" in data:
        return kd_pairs.rows(packed=data == "packed pairs", masked=data == "few pairs")
    generator = torch.Generator().manual_seed(5)
    if data == "text":
        return [_text(ROW, generator, supervised=row != 3) for row in range(ROWS)]
    rows = [
        [_text(length, generator, supervised=(row, length) not in ((4, 23), (5, 7))) for length in lengths]
        for row, lengths in enumerate(TEXTS)
    ]
    if data == "padded":
        lengths = [{"length": torch.tensor(len(text["tokens"]))} for texts in rows for text in texts]
        return [_padded(text, ROW) | length for text, length in zip(itertools.chain(*rows), lengths, strict=True)]
    return [_packed_row(texts, multiple=2 * cp if cp > 1 else 1) for texts in rows]


def with_masks(rows: list[dict[str, Tensor]], masks: MaskName) -> list[dict[str, Tensor]]:
    """The rows with other masks."""
    if masks == "one token":
        first = [row["loss_mask"] * (row["loss_mask"].cumsum(0) == 1) for row in rows]
        return [row | {"loss_mask": mask} for row, mask in zip(rows, first, strict=True)]
    if masks == "fractions":
        return [row | {"loss_mask": row["loss_mask"] * (1 + row["tokens"] % 3) / 3} for row in rows]
    if masks != "uneven":
        generator, nothing = torch.Generator().manual_seed(6), torch.zeros(ROW)
        changed = []
        for row in rows:
            own = (torch.rand(ROW, generator=generator) < 0.4).float()
            others = {
                "differ": {"kd_mask": own},
                "kd for both": {"loss_mask": own},
                "no kd": {"kd_mask": nothing},
                "no ce": {"kd_mask": own, "loss_mask": nothing},
                "every token": {"loss_mask": torch.ones(ROW)},
            }
            changed.append(row | others[masks])
        return changed
    place = torch.arange(ROW)  # of which the first quarter is on the first of two context-parallel ranks
    return [
        row
        | {
            "loss_mask": ((place < 5) & (number in (0, 2))).float(),
            "kd_mask": ((place > 1) & (place < 6) & (number in (0, 2, 4))).float(),
        }
        for number, row in enumerate(rows)
    ]


def microbatches(
    data: DataName, cp: int, mbs: int, dp_rank: int, dp_size: int, masks: MaskName = "same", step: int = 0
) -> list[dict[str, Tensor]]:
    """This data-parallel rank's share of a step, dealt out as megatron's sampler does; each step has other tokens."""
    every = samples(data, cp)
    if masks != "same":
        every = with_masks(every, masks)
    for row in every:
        sides = [(row, VOCAB), *((other, kd_pairs.TEACHER_VOCAB) for other in row.get("teacher_views", ()))]
        for side, vocab in sides:
            side["tokens"], side["labels"] = (side["tokens"] + 7 * step) % vocab, (side["labels"] + 7 * step) % vocab
    starts = range(dp_rank * mbs, len(every), dp_size * mbs)
    return [default_collate(every[start : start + mbs]) for start in starts]
