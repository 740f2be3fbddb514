"""Rows that the student writes: which they are, and their masks."""

import itertools
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mkd.config.run_state import RunState
from mkd.config.schedules import Schedule
from mkd.data.batch import KDBatch
from mkd.data.packing.row_layout import RowLayout
from mkd.errors import MkdCheckpointError
from mkd.rollout import on_policy
from mkd.rollout.facts import RolloutFacts, repeated_share
from mkd.rollout.interface import Decoding, Delivery, Request, WrittenText
from mkd.rollout.on_policy import OnPolicy
from mkd.rollout.rows import WrittenRowOptions, WrittenRows
from mkd.rollout.step_rows import StepRows
from mkd.rollout.stop_strings import StopStrings
from tests.support.tokenizers_of_kinds import transformers_tokenizer

LENGTH = 16


def policy(share: float | Schedule, packed: bool = False, **options: Any) -> OnPolicy:
    decoding = Decoding(tokens=4, end_tokens=frozenset(), true_vocab=9, rows=1, longest=LENGTH, seed=5)
    share = share if isinstance(share, Schedule) else Schedule.constant(share)
    layout = RowLayout(LENGTH, 4, packed, False)
    return OnPolicy(share, [(i,) for i in range(5)], layout, decoding, "cached", **options)


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


def test_the_share_follows_its_schedule() -> None:
    """No prompt is read twice in an epoch, and none comes later than with the largest share."""
    share = Schedule.parse("", "linear:0:1:4")
    found = [policy(share).requests(step, 4) for step in range(5)]
    assert [len(requests) for requests in found] == [0, 1, 2, 3, 4]
    assert found[4] == policy(1.0).requests(4, 4)
    assert list(found[2].values()) == list(policy(1.0).requests(2, 4).values())[:2]


@pytest.mark.parametrize("batches", [(4, 4, 8, 8), (8, 8, 4, 4), (4, 6, 8), (8, 3, 3, 4, 7)])
def test_no_prompt_is_read_twice_in_an_epoch_where_batches_change(batches: tuple[int, ...]) -> None:
    """None is left out if the share of each batch is a whole number of rows."""
    own, before, found = replace(policy(0.5), prompts=[(i,) for i in range(40)]), 0, []
    for step, rows in enumerate(batches):
        found += [request.number for request in own.requests(step, rows, before).values()]
        before += rows
    order = [request.number for request in own.requests(0, 80).values()]
    assert len(set(found)) == len(found) == sum(rows // 2 for rows in batches)
    assert all(rows % 2 == 0 for rows in batches) == (found == order[: len(found)])


@pytest.mark.parametrize("steps", [1, 3])
def test_batches_that_change_between_rollouts_or_in_one(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    written, own = Written(monkeypatch), policy(1.0, steps=steps)
    own = replace(own, prompts=[(i,) for i in range(40)], decoding=replace(own.decoding, true_vocab=40))
    before, found = 0, []
    for step, rows in enumerate((2, 2, 4, 4)):
        given = own.write([], written.groups, StepRows(step, rows // 2, 2, 1, before))
        found += [request.number for request, _ in given.rows.values()]
        before += rows
    assert found == [request.number for request in own.requests(0, 12).values()]


def test_each_prompt_has_several_samples() -> None:
    """The samples of two epochs of 5 prompts."""
    found = [request for step in range(5) for request in policy(1.0, samples=2).requests(step, 4).values()]
    assert [request.prompt for request in found[::2]] == [request.prompt for request in found[1::2]]
    samples = sorted((*request.prompt, request.sample) for request in found)
    assert samples == [(i, s) for i in range(5) for s in range(4)]


def test_teachers_of_prompts() -> None:
    found = policy(1.0, teachers=[-1, 0, 1, 0, 1]).requests(0, 5).values()
    assert {request.prompt[0]: request.teacher for request in found} == {0: -1, 1: 0, 2: 1, 3: 0, 4: 1}


class Written:
    """Stands in for `write_texts`, on one rank: texts that name the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[list[Request]] = []
        monkeypatch.setattr(on_policy, "write_texts", self)
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.groups: Any = SimpleNamespace(dp=group)

    def __call__(self, chunks: Any, groups: Any, requests: list[Request], *rest: Any) -> list[WrittenText]:
        self.requests.append(list(requests))
        return [WrittenText((len(self.requests), *request.prompt), False) for request in requests]

    def step(self, found: OnPolicy, iteration: int) -> tuple[list[int], RolloutFacts]:
        """Calls that wrote the texts of a step of 2 rows."""
        rows = found.write([], self.groups, StepRows(iteration, 2, 1, 1))
        assert list(found.requests(iteration, 2).values()) == [request for request, _ in rows.rows.values()]
        assert all(text.tokens[1:] == request.prompt for request, text in rows.rows.values())
        return [text.tokens[0] for _, text in rows.rows.values()], rows.facts


def test_replicas_write_their_own_texts_as_far_as_all_write_equally_many() -> None:
    def parts(*replicas: int) -> list[list[int]]:
        return Delivery(replicas, lambda *_: None).parts(2)

    assert parts(0, 1, 0, 1) == [[0, 2], [1, 3]]
    assert parts(1, 1, 1, 1) == [[2, 3], [0, 1]]
    assert parts(1, 1, 1, 0, 0) == [[3, 4], [0, 1, 2]]
    assert parts(0) == [[0], []]


@pytest.mark.parametrize(
    ("share", "rank", "expected"),
    [
        (0.5, 0, [("text", 3), (1, {3: 2}), ("text", 2), ("text", 1), (0, {1: 0}), ("text", 0)]),
        (0.25, 0, [(0, {}), (1, {}), ("text", 1), ("text", 0)]),
        (0.25, 1, [(1, {3: 1}), ("text", 1), (0, {1: 0}), ("text", 0)]),
    ],
)
def test_a_microbatch_is_given_away_with_its_last_text(
    monkeypatch: pytest.MonkeyPatch, share: float, rank: int, expected: list
) -> None:
    """Two microbatches of two rows on each of two ranks; the last text ends first. One without texts begins at once."""
    seen: list[tuple[Any, Any]] = []

    def write(chunks: Any, groups: Any, requests: list[Request], *rest: Any) -> list[WrittenText]:
        for index in reversed(range(len(requests))):
            rest[-1].done(index, [index, 7])
            seen.append(("text", index))
        return [WrittenText((index, 7), False) for index in range(len(requests))]

    def begin(number: int, rows: WrittenRows) -> None:
        assert all(text.tokens[1] == 7 for _, text in rows.rows.values())
        seen.append((number, {row: text.tokens[0] for row, (_, text) in rows.rows.items()}))

    monkeypatch.setattr(on_policy, "write_texts", write)
    groups: Any = SimpleNamespace(dp=SimpleNamespace(size=lambda: 2, rank=lambda: rank))
    found = policy(share).write([], groups, StepRows(0, 2, 2, 2), begin=begin)
    assert seen == expected
    whole = {row: text.tokens[0] for row, (_, text) in found.rows.items()}
    assert {row: text for entry in seen if entry[0] != "text" for row, text in entry[1].items()} == whole


def test_texts_of_several_steps_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that resumes reads them from the checkpoint's state; without that state it writes the rest again."""
    written, state = Written(monkeypatch), RunState()
    several = policy(1.0, steps=3, state=state)
    found = [written.step(several, iteration) for iteration in range(5)]
    assert [calls for calls, _ in found] == [[1, 1]] * 3 + [[2, 2]] * 2
    assert [facts.age for _, facts in found] == [0, 1, 2, 0, 1] and [len(call) for call in written.requests] == [6, 6]
    assert [facts.seconds > 0.0 for _, facts in found] == [True, False, False, True, False]
    assert "written_tokens_per_s" in found[0][1].metrics() and "written_tokens_per_s" not in found[1][1].metrics()
    resumed = policy(1.0, steps=3, state=RunState(rollout=state.rollout))
    assert written.step(resumed, 5)[0] == [2, 2] and len(written.requests) == 2
    anew = policy(1.0, steps=3)
    assert written.step(anew, 4)[0] == [3, 3] and len(written.requests[2]) == 4
    assert written.step(anew, 5)[1].age == 1
    other = policy(1.0, steps=3, samples=2, state=RunState(rollout=state.rollout))
    assert written.step(other, 5)[0] == [4, 4], "texts of other prompts are not used"


@pytest.mark.parametrize(
    "damage",
    [{"texts": None}, {"texts": []}, {"texts": [[9]] * 6}, {"texts": [[1] * 5] * 6}, {"texts": [["1"]] * 6}]
    + [{"written_at": value} for value in (None, -1, 3)],
)
def test_damaged_texts_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch, damage: dict) -> None:
    written, state = Written(monkeypatch), RunState()
    written.step(policy(1.0, steps=3, state=state), 0)
    broken = RunState(rollout={**state.rollout, **damage})
    with pytest.raises(MkdCheckpointError, match="texts of --kd-on-policy are damaged: resume from an earlier one"):
        written.step(policy(1.0, steps=3, state=broken), 1)


class Elsewhere:
    """A `TextWriter` with weights of every fourth step."""

    def __init__(self) -> None:
        self.iterations: list[int] = []

    def write(
        self, chunks: Any, groups: Any, requests: list[Request], options: Any, iteration: int, is_stopping: Any
    ) -> tuple[list[list[int]], int]:
        self.iterations.append(iteration)
        assert not is_stopping()
        return [[len(self.iterations), *request.prompt] for request in requests], iteration - iteration % 4


def test_texts_that_are_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their age is that of the weights, also after a resume."""
    written, state, writer = Written(monkeypatch), RunState(), Elsewhere()
    several = policy(1.0, steps=3, state=state, writer=writer)
    found = [written.step(several, iteration) for iteration in range(5)]
    assert [calls for calls, _ in found] == [[1, 1]] * 3 + [[2, 2]] * 2
    assert [facts.age for _, facts in found] == [0, 1, 2, 3, 4]
    assert writer.iterations == [0, 3] and state.rollout["weights_at"] == 0
    resumed = policy(1.0, steps=3, state=RunState(rollout=state.rollout), writer=writer)
    texts, facts = written.step(resumed, 5)
    assert texts == [2, 2] and facts.age == 5 and writer.iterations == [0, 3] and written.requests == []
    for value in (-1, 4, "0"):
        broken = RunState(rollout={**state.rollout, "weights_at": value})
        with pytest.raises(MkdCheckpointError, match="texts of --kd-on-policy are damaged"):
            written.step(policy(1.0, steps=3, state=broken, writer=writer), 5)


def test_stop_strings() -> None:
    """A string may be in the middle of a token, or be made of several."""
    words = {0: "a", 1: "b", 2: "end!", 3: "e", 4: "nd"}
    tokenizer: Any = SimpleNamespace(decode=lambda tokens, **_: "".join(map(words.get, tokens)), is_fast=False)
    decoding = Decoding(9, frozenset({1}), 5, 1, 9, stops=StopStrings(("end",), tokenizer))
    ends = {(): False, (0,): False, (0, 1): True, (0, 2): True, (3, 4): True, (3, 0, 4): False}
    assert {new: decoding.ends(new) for new in ends} == ends


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "metaspace_bpe"])
def test_a_stop_string_is_found_behind_any_character(kind: str) -> None:
    """Its characters, and those before it, may be several byte tokens each."""
    tokenizer = transformers_tokenizer(kind)
    for before, stop in itertools.product(
        ("", "a", "\u00e9", "\u20ac", "\U0001f600", "e\u0301"), ("\U0001f600", "\n\n", "\u20ac.")
    ):
        tokens = tokenizer(3 * before + stop, add_special_tokens=False)["input_ids"]
        assert StopStrings((stop,), tokenizer).end(tokens), (before, stop)
        assert before == stop or not StopStrings((stop,), tokenizer).end(tokens[:-1]), (before, stop)


def test_a_stop_string_is_found_in_parts_of_words_and_beside_spaces() -> None:
    """WordPiece marks parts of words with ##, which is no text; transformers may drop spaces before punctuation."""
    backend = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "#": 2, ".": 3, "[UNK]": 4}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([1, 0, 3]) == "##b a."
    cases = {(0, 1, 1): "abb", (0, *[1] * 9): "bbb", (0, 3): "a .", (*[1] * 9, 2): "b #", (1, 2): "b #"}
    for tokens, text in cases.items():
        found = {string: StopStrings((string,), tokenizer).end(tokens) for string in ("##", "##b", text)}
        assert found == {"##": False, "##b": False, text: True}, tokens
        count = 4 if text == "bbb" else len(tokens)
        assert StopStrings(("##", text), tokenizer).first_end((), tokens) == count


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "metaspace_bpe"])
def test_the_first_stop_of_several_tokens_is_that_of_one_after_the_other(kind: str) -> None:
    """Also where tokens are halves of characters."""
    tokenizer, random = transformers_tokenizer(kind), Random(3)
    stops, found = StopStrings(("\n\n", "\u20ac.", "a b", "\U0001f600"), tokenizer), []
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "b", " b", "\n", ".", "\u00e9")]
    pieces += [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\u20ac", "\U0001f600", "\u20ac.")]
    for _ in range(300):
        chosen = (random.choice(pieces) for _ in range(12))
        tokens = [token for piece in chosen for token in piece[random.randrange(2) * random.randrange(len(piece)) :]]
        where = random.randrange(len(tokens))
        before, new = tokens[:where], tokens[where:]
        expected = next((n for n in range(1, len(new) + 1) if stops.end([*before, *new[:n]])), None)
        assert stops.first_end(before, new) == expected
        found.append(expected)
    assert 30 < found.count(None) < 270 and len(set(found)) > 5


def replaced(sample: dict, packed: bool, teacher: int = -1, **options: Any) -> dict:
    text = Request((7, 8), teacher=teacher), WrittenText((1, 2, 3), ended=False)
    rows = WrittenRows({1: text}, policy(1.0, packed).layout, RolloutFacts(1, 3, 0, 0.5), WrittenRowOptions(**options))
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
    assert batch.written[1, :5].tolist() == [-1, 0, 1, 2, -1] and (batch.written[0] == -1).all()
    assert batch.teacher is None
    assert batch.segment_hashes == KDBatch.from_sample(batch_like(batch), 9).segment_hashes


def test_weights_of_written_tokens() -> None:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 9
    given = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(2, LENGTH)}
    given["position_ids"] = torch.arange(LENGTH).expand(2, LENGTH)
    halved = replaced(given, packed=False, half_life=2.0, is_routed=True, teacher=1)
    batch = KDBatch.from_sample(halved, 9)
    assert batch.kd_mask[1, 1:4].tolist() == pytest.approx([1.0, 0.5**0.5, 0.5])
    assert (batch.teacher[1] == 1).all() and (batch.teacher[0] == -1).all()
    batch = KDBatch.from_sample(replaced(given, packed=False, drops_cut_off=True), 9)
    assert not batch.kd_mask[1].any() and (batch.written == -1).all() and batch.kd_mask[0].all()


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
        "written_repeated": 0.0,
        "written_age": 0.0,
        "written_tokens_per_s": 10.0,
    }


def test_repeated_grams() -> None:
    """Runs of 4 tokens: 4 of 5 are repeated in the first text, none of 1 in the second; the third has none."""
    texts = [WrittenText(tokens, False) for tokens in ((1,) * 8, (1, 1, 1, 1), (1, 2, 3))]
    assert repeated_share(texts) == pytest.approx(4 / 6)
    assert repeated_share(texts[2:]) == 0.0
