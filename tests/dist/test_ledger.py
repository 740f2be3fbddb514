"""Assignment of texts to data-parallel ranks: every text is assigned once, and all ranks have the same ledger."""

from collections.abc import Callable

import torch.distributed as dist

from mkd.job.cache_build.texts import Ledger, TextRow
from tests.support.dist.pool import Pool

WINDOWS = [
    # per rank: rows with their texts
    [[["a", "b"], ["c"]], [["b"], ["d"]]],
    [[["d"], ["known"]], [["e", "e"], ["c", "f"]]],
    [[], [["f"], ["g"]]],
]


def run_case(rank: int, ranks: int) -> tuple[list[tuple[list[int], set[bytes]]], list[int], int, int]:
    ledger, found = Ledger({b"known"}, dist.group.WORLD), []
    for window in WINDOWS:
        rows = [
            TextRow({"number": i}, [(t.encode(), 10 + ord(t[0])) for t in texts])
            for i, texts in enumerate(window[rank])
        ]
        mine, keys = ledger.claim(rows)
        found.append(([row.sample["number"] for row in mine], keys))
    return found, ledger.waiting, ledger.segments, ledger.tokens


def test_every_text_is_assigned_once(gloo_pool: Callable[[int], Pool]) -> None:
    (first, *counts), (second, *others) = gloo_pool(2).run(run_case)
    assert first == [([0, 1], {b"a", b"b", b"c"}), ([], set()), ([], set())]
    assert second == [([1], {b"d"}), ([0, 1], {b"e", b"f"}), ([1], {b"g"})]
    assert counts == others == [[2, 4], 7, sum(10 + ord(letter) for letter in "abcdefg")]
