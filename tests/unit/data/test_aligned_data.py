"""Samples on both sides of two tokenizers: stored, cut, packed, counted, and as microbatches."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.filesize import decimal
from tokenizers import AddedToken
from torch.utils.data import default_collate

from mkd.data.batch import KDBatch
from mkd.data.packing.aligned_layout import AlignedRowLayout, counted_chunks
from mkd.data.packing.aligned_plan import best_fit_all_views, cut_aligned, pack_aligned
from mkd.data.packing.aligned_streams import AlignedRows
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.streams import RowOptions
from mkd.data.sources.aligned import (
    AlignedBatch,
    AlignedSample,
    AlignedStore,
    DocumentBatch,
    TeacherText,
    aligned_base,
    probe_aligned,
    tokenize_aligned,
)
from mkd.data.sources.text import RawBatch
from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import unaligned
from mkd.xtoken.text.samples import AlignedPair
from mkd.xtoken.text.tokenize_and_align import TOO_SHORT, UNALIGNED, TextAligner
from tests.support.chats import MARKED, PLAIN, talk, write_lines
from tests.support.dist.kd_pairs import rows, sample
from tests.support.e2e.small_job import END, make_tokenizer, save_tokenizer, text, write_data
from tests.support.tokenizers_of_kinds import transformers_tokenizer

ROWS = (32, 40)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers, documents of the first, and conversations."""
    root = tmp_path_factory.mktemp("paired")
    ours, theirs = make_tokenizer(), make_tokenizer(400, "other words " * 9 + text()[::2])
    for name, tokenizer, template in (("ours", ours, MARKED), ("theirs", theirs, PLAIN)):
        save_tokenizer(tokenizer, root / name)
        (root / name / "chat_template.jinja").write_text(template)
    end = ours.token_to_id(END)
    documents = [[*ours.encode(part).ids, end] for part in text().split("\n\n")[:60] if part]
    # A token in two parts, as its tokenizer does not write it, and a document without text.
    word = next(token for token in sorted(ours.get_vocab()) if len(token) == 2 and token.isalpha() and token.isascii())
    odd = [*map(ours.token_to_id, word), end]
    write_data(root / "text", [*documents, odd, [end]])
    chats = [{"messages": talk("a question " * n, "the answer, at last " * n)} for n in range(1, 9)]
    write_lines(root / "chat.jsonl", chats)
    return root


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> TextAligner:
    """A byte-level tokenizer, and one of another kind that begins its texts with a token."""
    root = tmp_path_factory.mktemp("kinds")
    for kind in ("byte_bpe", "metaspace_bpe"):
        tokenizer = deepcopy(transformers_tokenizer(kind))
        tokenizer.add_tokens([AddedToken(f"<|{kind}|>", special=True)])
        tokenizer.save_pretrained(root / kind)
    return TextAligner((str(root / "byte_bpe"), str(root / "metaspace_bpe")), ("--tokenizer-model", "--kd-teacher-hf"))


def encoder(root: Path, all_messages: bool = False) -> TextAligner:
    return TextAligner(
        (str(root / "ours"), str(root / "theirs")), ("--tokenizer-model", "--kd-teacher-hf"), all_messages
    )


def store(root: Path, name: str, said: list[str] | None = None) -> AlignedStore:
    file, coder = str(root / name), encoder(root)
    base = aligned_base(file, coder, str(root / "cache"))
    tokenize_aligned(file, coder, base, [].append if said is None else said.append)
    return AlignedStore(base, (0.0, 1.0), 2)


def layout(packed: bool, everywhere: bool = False) -> AlignedRowLayout:
    sides = [RowLayout(length, 8, packed, everywhere) for length in ROWS]
    return AlignedRowLayout(sides[0], (sides[1],))


def test_documents_are_read_as_text_and_counted(root: Path, capsys: pytest.CaptureFixture) -> None:
    said: list[str] = []
    found = store(root, "text", said)
    assert len(said) == 1 and "tokenizing for 2 tokenizers" in said[0]
    size = decimal((root / "text.bin").stat().st_size)  # all of it is counted, for the rate and the time left
    assert f"tokenizing: {size} of {size}, " in capsys.readouterr().err
    assert found.facts.changed == 1 and "was the data made with this tokenizer" not in str(found.facts)
    assert "(was the data made with this tokenizer?)" in str(replace(found.facts, changed=found.facts.samples))
    assert found.facts.skipped == {"without text": 1}
    assert found.facts.tokens == found.lengths.sum(axis=0).tolist()
    last, ours = found.read(found.facts.samples - 1), encoder(root).tokenizers[0].tokenizer
    assert len(last.ids) == 2 and ours.decode(last.ids).endswith(END)
    store(root, "text", said)
    assert len(said) == 1, "tokenized again"


@pytest.mark.parametrize(
    ("document", "teachers"),
    [
        (["<|start|>", "a word", "<|end|>"], ["<s>", "a word", "</s>"]),
        (["a word", "<|end|>", "the other"], ["<s>", "a word", "</s>", "<s>", "the other"]),
        (
            ["<|start|>", "a word", "<|end|>", "<|start|>", "the other", "<|end|>"],
            ["<s>", "a word", "</s>", "<s>", "the other", "</s>"],
        ),
        (["<|start|>", "a word", "<|start|>", "the other"], ["<s>", "a word", "<s>", "the other"]),
        (["<|end|>", "<|end|>", "a word"], ["<s>", "</s>", "<s>", "</s>", "<s>", "a word"]),
    ],
)
def test_bos_and_eos_in_all_views(kinds: TextAligner, document: list[str], teachers: list[str]) -> None:
    """As Megatron's own tools make documents with tokenizers that have a token before each text."""
    ours, theirs = kinds.tokenizers
    ids, wanted = (
        np.concatenate([side.encode(part).ids if part[0] != "<" else [vocabulary[part]] for part in parts])
        for side, parts in ((ours, document), (theirs, teachers))
        for vocabulary in (side.tokenizer.get_vocab(),)
    )
    coded = kinds(DocumentBatch("x", [ids]))
    [found] = coded.samples
    assert found.ids.tolist() == ids.tolist() and coded.changed == 0
    assert found.views[0].ids.tolist() == wanted.tolist()
    assert found.targets.tolist() == [False, *[True] * (len(ids) - 1)]
    ends = np.flatnonzero(ids == ours.tokenizer.eos_token_id)
    assert (found.views[0].student_chunk[ends[ends > 0]] >= 0).all()
    strict = replace(kinds, special_pairs=((),))  # to the loss, no special token is another
    assert strict.fingerprint != kinds.fingerprint
    for kept in strict(DocumentBatch("x", [ids])).samples:
        assert (kept.views[0].student_chunk[ends] == -1).all()
    assert coded.spelled_out == 0


def test_split_special_tokens_are_counted(kinds: TextAligner) -> None:
    ours = kinds.tokenizers[0]
    tokens = [ours.encode(words).ids for words in ("a word <|byte_bpe|> more", "a word <|turn|> more")]
    coded = kinds(DocumentBatch("x", tokens))
    assert coded.spelled_out == 1 and len(coded.samples) == 2


def test_stored_sample_round_trip() -> None:
    random = np.random.RandomState(0)
    whole = sample((17, 23), random, True)
    again = AlignedSample.of_words(whole.words(), whole.lengths)
    for name in ("ids", "targets"):
        assert np.array_equal(getattr(again, name), getattr(whole, name))
    for name in ("ids", "targets", "chunk", "student_chunk"):
        assert np.array_equal(getattr(again.views[0], name), getattr(whole.views[0], name))


def test_chunks_of_rows_are_the_same_text(root: Path) -> None:
    """Also of pieces of long samples, packed and not."""
    ours, theirs = (t.tokenizer for t in encoder(root).tokenizers)
    for name in ("text", "chat.jsonl"):
        for packed in (True, False):
            stream = AlignedRows(store(root, name), RowOptions(layout(packed), False, 3), name)
            batch = KDBatch.from_sample(default_collate([stream.row(i) for i in range(3)]), None)
            other = batch.teacher_views[0]
            assert other.chunks > 20
            for chunk in range(other.chunks):
                mine, its = other.student_chunk == chunk, other.chunk == chunk
                assert ours.decode(batch.labels[mine]).strip() == theirs.decode(other.batch.labels[its]).strip()
                assert batch.ce_mask[mine].all()
                assert other.student_first[mine].sum() == other.first[its].sum() == 1


@pytest.mark.parametrize("positions", [(64, 16), (24, 64), (16, 16)], ids=str)
def test_rows_may_be_longer_than_the_positions_of_the_models(root: Path, positions: tuple[int, int]) -> None:
    """In each view, a text in a packed row has at most the positions of the model that reads it."""
    limits = [min(row, most) for row, most in zip(ROWS, positions, strict=True)]
    views = [RowLayout(row, 8, True, False, most) for row, most in zip(ROWS, positions, strict=True)]
    for name in ("text", "chat.jsonl"):
        found = store(root, name)
        stream = AlignedRows(found, RowOptions(AlignedRowLayout(views[0], (views[1],)), False, 3), name)
        longest = np.zeros(2, dtype=int)
        for row in map(stream.row, range(stream.per_epoch)):
            for number, view in enumerate((row, *row["teacher_views"])):
                texts = view["cu_seqlens"].diff()
                padded = view["cu_seqlens_padded"].diff()[texts > 0]
                assert padded.max() <= limits[number]
                assert view["position_ids"][view["ce_mask"] > 0].max() < limits[number]
                longest[number] = max(longest[number], int(texts.max()))
        assert any(longest > np.array(limits) - 8)  # some texts had to be cut there
        assert (found.lengths - 1 > limits).any()


def test_every_target_of_a_document_is_in_one_row(root: Path) -> None:
    found = store(root, "text")
    stream = AlignedRows(found, RowOptions(layout(True), False, 3), "text")
    labels = sum(int(stream.row(i)["ce_mask"].sum()) for i in range(stream.per_epoch))
    assert labels == found.facts.tokens[0] - found.facts.samples
    of_teacher = sum(len(s.ids) - 1 for i in range(found.facts.samples) for s in found.read(i).views)
    places = sum(int(stream.row(i)["teacher_views"][0]["cu_seqlens"][-1]) for i in range(stream.per_epoch))
    assert places == of_teacher


def test_long_samples_are_cut_where_chunks_begin() -> None:
    random = np.random.RandomState(1)
    long = [sample((n, m), random, True) for n, m in ((100, 90), (31, 60), (150, 120), (5, 5))]
    lengths = np.array([s.lengths for s in long])
    pieces = cut_aligned(lengths, ROWS, long.__getitem__, drop_long=False)
    assert (pieces.positions <= ROWS).all() and pieces.split == 3 and pieces.unfit == 0
    for number, whole in enumerate(long):
        mine = np.flatnonzero(pieces.sample == number)
        ends = pieces.start[mine] + pieces.positions[mine]
        assert pieces.start[mine[0]].tolist() == [0, 0] and (ends[-1] == lengths[number] - 1).all()
        assert (ends[:-1] == pieces.start[mine[1:]]).all()
        for student, teacher in ends[:-1] + 1:
            first = whole.views[0].student_chunk[student]
            assert first == whole.views[0].chunk[teacher] >= 0
            assert first not in whole.views[0].student_chunk[:student]
    dropped = cut_aligned(lengths, ROWS, long.__getitem__, drop_long=True)
    assert (dropped.dropped, len(dropped)) == (3, 1)


def test_long_run_without_a_chunk_is_left_out() -> None:
    n = 120
    chunk = np.full(n, -1, dtype=np.int32)
    chunk[:10], chunk[-10:] = np.arange(10), np.arange(10, 20)
    other = TeacherText(np.zeros(n, int), np.ones(n, bool), chunk, chunk)
    pieces = cut_aligned(
        np.array([[n, n]]), ROWS, lambda _: AlignedSample(np.zeros(n, int), np.ones(n, bool), (other,)), drop_long=False
    )
    assert pieces.unfit == 1
    assert pieces.positions[:, 0].tolist() == [8, 10]


def test_packing_fits_all_views_and_wastes_little() -> None:
    random = np.random.RandomState(2)
    places = np.stack([random.randint(1, length + 1, 400) for length in ROWS], axis=1)
    plan = pack_aligned(places, ROWS, 8, seed=5)
    assert sorted(plan.piece.tolist()) == list(range(400))
    padded = -(-places // 8) * 8
    for row in range(len(plan)):
        assert (padded[plan.row(row)].sum(axis=0) <= ROWS).all()
    assert len(plan) <= 1.25 * max(padded[:, side].sum() / length for side, length in enumerate(ROWS))
    again = pack_aligned(places, ROWS, 8, seed=5)
    assert np.array_equal(plan.piece, again.piece)


def test_best_fit_takes_the_fullest_bin() -> None:
    sizes = np.array([[6, 1], [5, 5], [4, 1], [1, 1]])
    assert best_fit_all_views(sizes, np.array([10, 10])).tolist() == [0, 1, 0, 1]


def test_counted_chunks() -> None:
    student = np.array([0, 0, 1, 2, 2, -1, 3])
    teacher = np.array([-1, 0, 1, 1, 2, 3])
    yes = np.ones(7, dtype=bool)
    targets = yes.copy()
    targets[4] = False  # half of chunk 2
    other = TeacherText(np.zeros(6, int), np.ones(6, bool), teacher, student)
    mine, its = counted_chunks(yes, other, everywhere=False)
    # Chunk 0 has the first token, which nothing predicts.
    assert mine.tolist() == [-1, 0, 1, 1, -1, 2] and its.tolist() == [-1, 0, 0, 1, 2]
    mine, its = counted_chunks(targets, other, everywhere=False)
    assert mine.tolist() == [-1, 0, -1, -1, -1, 1] and its.tolist() == [-1, 0, 0, -1, 1]
    assert counted_chunks(targets, other, everywhere=True)[0].tolist() == [-1, 0, 1, 1, -1, 2]
    nothing = TeacherText(np.zeros(6, int), np.ones(6, bool), np.full(6, -1), np.full(7, -1))
    assert [x.max() for x in counted_chunks(yes, nothing, everywhere=True)] == [-1, -1]


@pytest.mark.parametrize("packed", [True, False])
def test_context_parallel_ranks_hold_all_rows_once(packed: bool) -> None:
    whole = KDBatch.from_sample(default_collate(rows(packed)[:4]), None)
    parts = [whole.cp_slice(rank, 2).teacher_views[0] for rank in range(2)]
    for side, name in ((whole.teacher_views[0], "chunk"), (whole.teacher_views[0], "student_chunk")):
        seen = torch.cat([getattr(part, name).flatten() for part in parts]).sort().values
        assert torch.equal(seen, getattr(side, name).flatten().sort().values)
    for part in parts:
        assert part.chunks == whole.teacher_views[0].chunks
        assert part.chunk.shape == part.batch.tokens.shape
    for rank in range(2):
        part = whole.cp_slice(rank, 2).to_device()
        view = part.teacher_views[0]
        assert torch.equal(view.labels, view.batch.labels) and torch.equal(view.student_labels, part.labels)
        assert torch.equal(view.student_ce, part.ce_mask != 0)
    changed = default_collate(rows(packed)[:4])
    changed["teacher_views"][0]["chunk"][changed["teacher_views"][0]["chunk"] == 1] = 0
    assert KDBatch.from_sample(changed, None).content_hash() != whole.content_hash()


def test_packed_rows_have_the_chunks_of_unpacked_ones() -> None:
    packed, alone = (KDBatch.from_sample(default_collate(rows(p)), None).teacher_views[0] for p in (True, False))
    assert packed.chunks == alone.chunks > 20
    for name in ("chunk", "student_chunk"):
        sizes = [torch.bincount(getattr(side, name)[getattr(side, name) >= 0]) for side in (packed, alone)]
        assert torch.equal(*sizes)


def test_unaligned_sample_is_left_out(root: Path) -> None:
    """So is a text of one token; a broken line is named."""
    coder = encoder(root)
    one = coder.tokenizers[0].tokenizer.convert_tokens_to_ids("t")
    assert dict(+coder(DocumentBatch("x", [np.array([one])])).skipped) == {TOO_SHORT: 1}
    parts = AlignedPair(*(np.arange(3),) * 2, np.ones(3, dtype=bool), np.zeros(3, dtype=bool), unaligned(3, 3))
    coded = AlignedBatch()
    coder._add(coded, [parts], TOO_SHORT)
    assert not coded.samples and dict(+coded.skipped) == {UNALIGNED: 1}
    with pytest.raises(MkdDataError, match=r"a document has token id 307, .* has 307 tokens"):
        coder(DocumentBatch("x", [np.array([1, 307])]))
    with pytest.raises(MkdDataError, match=r"chats, line 7: broken JSON"):
        coder(RawBatch("chats", 7, [b"{"]))
    assert probe_aligned(str(root / "chat.jsonl"), coder)[0] > 100


def test_no_usable_sample_is_an_error(root: Path) -> None:
    write_lines(root / "mute.jsonl", [{"messages": talk("hello")}])
    with pytest.raises(MkdDataError, match="no sample can be used"):
        store(root, "mute.jsonl")
    for lengths, of_student, of_teacher in (((2, 4096), 8, 0), ((4096, 2), 0, 8)):
        sides = [RowLayout(length, 1, True, False) for length in lengths]
        with pytest.raises(MkdDataError, match="none of its 8 samples can be used") as told:
            AlignedRows(
                store(root, "chat.jsonl"), RowOptions(AlignedRowLayout(sides[0], (sides[1],)), True, 3), "chat.jsonl"
            )
        assert f"{of_student} are longer than --seq-length {lengths[0]} in the student's" in str(told.value)
        assert f"{of_teacher} are longer than --kd-teacher-seq-length {lengths[1]} in a teacher's" in str(told.value)
