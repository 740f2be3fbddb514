"""Rows that the student writes: which they are, and their masks."""

import torch

from mkd.data.batch import KDBatch
from mkd.data.packing.row_layout import RowLayout
from mkd.rollout.interface import Decoding, Request, WrittenText
from mkd.rollout.on_policy import OnPolicy, RolloutFacts, WrittenRows

LENGTH = 16


def policy(share: float, packed: bool = False) -> OnPolicy:
    decoding = Decoding(tokens=4, end_tokens=frozenset(), true_vocab=9, rows=1, longest=LENGTH, seed=5)
    return OnPolicy(share, [(i,) for i in range(5)], RowLayout(LENGTH, 4, packed, False), decoding, "cached")


def test_the_share_of_rows_is_exact_and_spread() -> None:
    for share, rows, expected in ((1.0, 3, [0, 1, 2]), (0.5, 6, [1, 3, 5]), (0.29, 100, 29), (0.7, 10, 7)):
        found = sorted(policy(share).requests(0, rows))
        assert (found if isinstance(expected, list) else len(found)) == expected


def test_each_epoch_has_every_prompt_once() -> None:
    """Samples of later epochs have other random numbers."""
    found = [request for step in range(5) for request in policy(0.5).requests(step, 4).values()]
    assert sorted((request.sample, *request.prompt) for request in found) == [(e, i) for e in (0, 1) for i in range(5)]
    assert [request.prompt for request in found[:5]] != [request.prompt for request in found[5:]]
    assert list(policy(0.5).requests(3, 4).values()) == found[6:8]


def replaced(sample: dict, packed: bool) -> dict:
    text = Request((7, 8)), WrittenText((1, 2, 3), ended=True)
    rows = WrittenRows({1: text}, policy(1.0, packed).layout, RolloutFacts(1, 3, 0, 0.5))
    whole = {name: value.clone() for name, value in sample.items()}
    (found,) = rows.replace_in(iter([sample]))
    assert all(torch.equal(sample[name], value) for name, value in whole.items()), "the given sample stays"
    return found


def test_rows_of_megatron() -> None:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 9
    given = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(2, LENGTH)}
    given["position_ids"] = torch.arange(LENGTH).expand(2, LENGTH)
    batch = KDBatch.from_sample(replaced(given, packed=False), 9)
    assert torch.equal(batch.tokens[0], tokens[0]) and batch.ce_mask[0].all() and batch.kd_mask[0].all()
    assert batch.tokens[1, :4].tolist() == [7, 8, 1, 2] and batch.labels[1, :4].tolist() == [8, 1, 2, 3]
    assert batch.kd_mask[1].nonzero().flatten().tolist() == [1, 2, 3] and not batch.ce_mask[1].any()
    assert batch.padding[1].sum() == LENGTH - 4 and not batch.padding[0].any()
    assert batch.segment_hashes == KDBatch.from_sample(batch_like(batch), 9).segment_hashes


def batch_like(batch: KDBatch) -> dict:
    names = ("tokens", "labels", "ce_mask", "kd_mask", "position_ids")
    return {name: getattr(batch, name) for name in names} | {"length": torch.tensor([LENGTH, 4])}


def test_packed_rows() -> None:
    layout = policy(1.0, packed=True).layout
    ids = torch.arange(8).numpy()
    row = {name: torch.as_tensor(value) for name, value in layout.row([(ids, ids > 2)]).items()}
    given = {name: torch.stack([value, value]) for name, value in row.items()}
    batch = KDBatch.from_sample(replaced(given, packed=True), 9)
    assert batch.bounds == (0, 8, LENGTH, LENGTH + 4, 2 * LENGTH)
    assert batch.kd_mask[0, LENGTH:].nonzero().flatten().tolist() == [1, 2, 3]
    assert batch.ce_mask.sum() == 5 and batch.kd_mask.sum() == 8


def test_measurements() -> None:
    assert RolloutFacts(4, 20, 1, 2.0).metrics() == {
        "written_tokens": 5.0,
        "written_cut_off": 0.25,
        "written_tokens_per_s": 10.0,
    }
