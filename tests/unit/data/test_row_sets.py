"""Training, validation and test sets of packed rows, chat files and blends, without a process group."""

from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import default_collate

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.losses import check_top_k_in_vocabulary
from mkd.config.megatron.checks.rows import check_rows
from mkd.data.batch import KDBatch
from mkd.data.checks import check_splits
from mkd.data.datasets import build_datasets
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_sets import RowSets
from mkd.data.packing.streams import RowOptions
from mkd.data.sources.chat import ChatTokenizer
from mkd.errors import MkdConfigError, MkdDataError
from mkd.job.teacher_check import _first_batch
from tests.support.chats import MARKED, chat_tokenizer, talk, write_lines
from tests.support.e2e.small_job import VOCAB, write_data

ROW = 64


class Ids:
    """The tokenizer attributes that megatron reads."""

    vocab_size, eod, pad = VOCAB, VOCAB - 1, VOCAB - 1
    unique_identifiers: dict[str, Any] = {}  # noqa: RUF012


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 documents, 30 conversations and a tokenizer."""
    root = tmp_path_factory.mktemp("rows")
    random = np.random.RandomState(0)
    write_data(root / "text", [[*random.randint(1, VOCAB - 1, n), VOCAB - 1] for n in random.randint(1, 150, 20)])
    chats = [talk(*("hello there " * n for n in random.randint(1, 4, 2))) for _ in range(30)]
    write_lines(root / "chat.jsonl", [{"messages": messages} for messages in chats])
    chat_tokenizer(root / "tokenizer", MARKED)
    return root


def sets_of(
    root: Path, blend: tuple[list[str], list[float] | None], split: str = "80,20,0", **changes: Any
) -> tuple[RowSets, list[str]]:
    said: list[str] = []
    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=ROW,
        blend=([str(root / name) for name in blend[0]], blend[1]),
        split=split,
        path_to_cache=str(root / "cache"),
        tokenizer=Ids(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    layout = RowLayout(ROW, 16, is_packed=True, kd_everywhere=False)
    tokenizer = ChatTokenizer(str(root / "tokenizer"))
    options = RowOptions(layout, drop_long=False, seed=5)
    return replace(RowSets(config, options, tokenizer, VOCAB, said.append), **changes), said


def unpacked(sets: RowSets) -> RowSets:
    return replace(sets, options=replace(sets.options, layout=replace(sets.options.layout, is_packed=False)))


def test_a_blend_of_documents_and_chats(root: Path) -> None:
    sets, said = sets_of(root, (["text", "chat.jsonl"], [1.0, 3.0]))
    train, valid, test = build_datasets(sets.config, [40, 99, 10], evaluated=8, rows=sets)
    assert len(train) == 40
    assert train.split == Split.train
    assert valid.split == Split.valid
    assert test is None
    full = [int((row["ce_mask"] == 1).sum()) for row in train]
    assert min(full) > 0
    batch = KDBatch.from_sample(default_collate([train[0], train[1]]), VOCAB)
    assert batch.packed is not None
    chats = [row["ce_mask"].sum() < row["cu_seqlens"][-1] for row in train]
    assert sum(chats) == 30
    assert [text.split(":")[0].split()[0] for text in said if "rows wanted" in text] == ["training"] * 2 + [
        "validation"
    ] * 2


@pytest.mark.parametrize("everywhere", [False, True])
def test_unlearned_answers_in_rows(root: Path, everywhere: bool) -> None:
    """Packed or not: the rows of the same conversations without the key, with masks of 0 on the unlearned answers."""
    chats = [talk("a", "yes " * n, "b", "yes " * n) for n in range(1, 5)]
    unlearned = [[*chat[:3], {**chat[3], "weight": 0}] for chat in chats]
    for name, messages in (("all.jsonl", chats), ("some.jsonl", unlearned)):
        write_lines(root / name, [{"messages": part} for part in messages])
    for change in (lambda sets: sets, unpacked):
        found = []
        for name in ("all.jsonl", "some.jsonl"):
            sets = change(sets_of(root, ([name], None), split="100,0,0")[0])
            layout = replace(sets.options.layout, row_length=256, kd_everywhere=everywhere)
            sets = replace(sets, options=replace(sets.options, layout=layout))
            found.append(build_datasets(sets.config, [8, 0, 0], evaluated=0, rows=sets)[0])
        for whole, part in zip(*found, strict=True):
            assert whole.keys() == part.keys()
            for key in whole.keys() - {"ce_mask", "kd_mask"}:
                assert torch.equal(torch.as_tensor(whole[key]), torch.as_tensor(part[key])), key
            taken = whole["ce_mask"] - part["ce_mask"]
            assert set(taken.tolist()) == {0.0, 1.0} and part["ce_mask"].sum() == taken.sum()
            assert torch.equal(part["kd_mask"], whole["kd_mask"] if everywhere else part["ce_mask"])


def test_rows_are_the_same_again_and_for_longer_runs(root: Path) -> None:
    blend = (["text", "chat.jsonl"], [0.4, 0.6])
    first, longer = (sets_of(root, blend)[0].build([size, 4, 0])[0] for size in (20, 90))
    for index in (0, 7, 19):
        for name, value in first[index].items():
            assert torch.equal(value, longer[index][name]), name


def test_evaluations_read_the_same_rows(root: Path) -> None:
    sets, _ = sets_of(root, (["chat.jsonl"], None))
    valid = build_datasets(sets.config, [4, 0, 0], evaluated=3, rows=sets)[1]
    assert [torch.equal(valid[i]["tokens"], valid[i + 3]["tokens"]) for i in range(3)] == [True] * 3


def test_training_and_validation_share_no_sample(root: Path) -> None:
    sets, _ = sets_of(root, (["text"], None))
    train, valid, _ = sets.build([50, 50, 0])

    def texts(rows: Any) -> set[tuple[int, ...]]:
        bounds = [(row["tokens"].tolist(), row["cu_seqlens_padded"].unique().tolist()) for row in rows]
        return {tuple(tokens[a:b]) for tokens, ends in bounds for a, b in pairwise(ends)}

    assert len(texts(train)) > 10
    assert not {t for t in texts(train) if any(t)} & {t for t in texts(valid) if any(t)}


def test_unpacked_blends_have_megatrons_rows_and_one_conversation_a_row(root: Path) -> None:
    sets, said = sets_of(root, (["text", "chat.jsonl"], [1.0, 1.0]))
    train = unpacked(sets).build([10, 4, 0])[0]
    sample = default_collate([train[i] for i in range(10)])
    batch = KDBatch.from_sample(sample, VOCAB)
    assert batch.packed is None
    assert batch.tokens.shape == (10, ROW)
    assert sorted(sample["length"].tolist())[5:] == [ROW] * 5
    assert max(sorted(sample["length"].tolist())[:5]) < ROW
    assert any("concatenated documents" in text for text in said)


def test_data_without_weights_are_read_in_proportion(root: Path) -> None:
    sets, said = sets_of(root, (["text", "chat.jsonl"], None), split="1,0,0")
    sets.build([1000, None, None])
    epochs = [float(text.split(" rows wanted, ")[1].split()[0]) for text in said if "rows wanted" in text]
    assert len(epochs) == 2
    assert 0.6 < epochs[0] / epochs[1] < 1.6


def test_first_batch_without_assistant_tokens_uses_all_tokens(root: Path) -> None:
    sets, _ = sets_of(root, (["chat.jsonl"], None), split="1,0,0")
    rows = sets.build([4, None, None])[0]
    usual = _first_batch(rows, 2, VOCAB)
    assert torch.equal(usual.ce_mask.flatten(), torch.cat([rows[0]["ce_mask"], rows[1]["ce_mask"]]))
    prompts = [{**rows[i], "ce_mask": torch.zeros(ROW), "kd_mask": torch.ones(ROW)} for i in range(2)]
    assert _first_batch(prompts, 3, VOCAB).ce_mask.sum() == 2 * ROW


def test_row_set_errors(root: Path) -> None:
    with pytest.raises(MkdDataError, match=r"largest token id is \d+, but the model's vocabulary has 50 tokens"):
        sets_of(root, (["chat.jsonl"], None), true_vocab=50)[0].build([4, 4, 0])
    with pytest.raises(MkdDataError, match=r"--split 999,1,0 leaves no sample of .*chat.jsonl for validation"):
        sets_of(root, (["chat.jsonl"], None), split="999,1,0")[0].build([4, 4, 0])
    sets, _ = sets_of(root, (["chat.jsonl"], None), split="1,0,0")
    with pytest.raises(
        MkdDataError, match=r"no validation data: give it a share in --split \(now 1,0,0\) or a --valid-"
    ):
        check_splits(sets.config, evaluates=True)
    parts = SimpleNamespace(mock=False, blend_per_split=[None, (["a"], None), None], split_matrix=None, split=None)
    with pytest.raises(MkdDataError, match=r"there is no training data: give it a --train-data-path$"):
        check_splits(parts, evaluates=True)
    sets.build([4, 4, 0])
    chats = next((root / "cache").glob("chat-*-chat.json"))
    tokens = chats.read_text()
    try:
        chats.write_text("{")
        with pytest.raises(MkdDataError, match=r"chat.json is broken .*delete it"):
            sets.build([4, 4, 0])
    finally:
        chats.write_text(tokens)


ARGS = {
    "mock_data": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "position_embedding_type": "rope",
    "tokenizer_type": "HuggingFaceTokenizer",
    "context_parallel_size": 1,
    "seq_length": 64,
}
KD = {"teacher_hf": ["t"], "ratio": 0.5}
REFUSED = {
    "mock": ({"mock_data": True}, {"packing": "best_fit"}, "--mock-data does not work with --kd-packing best_fit"),
    "reset": ({"reset_position_ids": True}, {}, "--reset-position-ids does not work with a chat file in --data-path"),
    "eod": ({"eod_mask_loss": True}, {}, "--eod-mask-loss does not work with a chat file"),
    "tokenizer": ({"tokenizer_type": "NullTokenizer"}, {}, "--tokenizer-type is NullTokenizer, but chat files need"),
    "cp": (
        {"context_parallel_size": 2},
        {"packing": "best_fit", "packing_multiple": 2},
        r"--kd-packing-multiple 2 is not divisible by 2 \* --context-parallel-size 2",
    ),
    "row": (
        {"seq_length": 72},
        {"packing": "best_fit"},
        "--seq-length 72 is not divisible by --kd-packing-multiple 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_do_not_go_together(case: str) -> None:
    args, kd, message = REFUSED[case]
    check_rows(Namespace(**ARGS), KDConfig(**KD, **kd), has_chats=True) if case not in ("cp", "row") else None
    with pytest.raises(MkdConfigError, match=message):
        check_rows(Namespace(**{**ARGS, **args}), KDConfig(**KD, **kd), has_chats=True)


def test_position_ids_that_nothing_reads() -> None:
    """Rotary embeddings count the tokens of a row."""
    args = {**ARGS, "reset_position_ids": True}
    with pytest.raises(MkdConfigError, match=r"--reset-position-ids has no effect on the student: positions of type"):
        check_rows(Namespace(**args), KDConfig(**KD), has_chats=False)
    check_rows(Namespace(**{**args, "position_embedding_type": "learned_absolute"}), KDConfig(**KD), has_chats=False)


def test_no_more_tokens_than_the_vocabulary_has() -> None:
    check_top_k_in_vocabulary(KDConfig(**KD, top_k=VOCAB), VOCAB)
    check_top_k_in_vocabulary(KDConfig(**KD), VOCAB)
    with pytest.raises(MkdConfigError, match=f"--kd-top-k is {VOCAB + 1}, but the vocabulary has {VOCAB} tokens"):
        check_top_k_in_vocabulary(KDConfig(**KD, top_k=VOCAB + 1), VOCAB)


def test_values_of_flags() -> None:
    for name, value in {"packing": "first_fit", "long_samples": "cut", "mask": "prompt", "packing_multiple": 0}.items():
        with pytest.raises(MkdConfigError, match=f"--kd-{name.replace('_', '-')}"):
            KDConfig(**KD, **{name: value})
    check_rows(Namespace(**{**ARGS, "eod_mask_loss": True}), KDConfig(**KD), has_chats=False)


@pytest.mark.parametrize(
    ("names", "weights", "packed"),
    [
        (["text"], None, True),
        (["chat.jsonl"], None, True),
        (["chat.jsonl"], None, False),
        (["chat.jsonl", "text"], [3.0, 1.0], False),
    ],
)
def test_rows_per_epoch(root: Path, names: list[str], weights: list[float] | None, packed: bool) -> None:
    """The sum over the files, whatever their weights."""
    sets, said = sets_of(root, (names, weights))
    sets = sets if packed else unpacked(sets)
    rows = sets.rows_per_epoch()
    assert not any("epochs" in line for line in said)
    (train, *_) = sets.build([rows, None, None])
    assert rows == sum(stream.per_epoch for stream in train._streams)
