"""Projections between vocabularies: what tokens spell, rows that sum to one, files that belong to two tokenizers."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from mkd.errors import MkdCacheError, MkdConfigError
from mkd.xtoken.text.token_bytes import read_token_bytes
from mkd.xtoken.text.tokens import SpanTokenizer
from mkd.xtoken.vocabulary import projection as projection_module
from mkd.xtoken.vocabulary.build import build_projection, projection_for
from mkd.xtoken.vocabulary.projection import Projection, ProjectionOptions
from tests.support.fork_server import fork_server
from tests.support.tokenizers_of_kinds import KINDS, span_tokenizer, transformers_tokenizer

PAIRS = [(a, b) for a in KINDS for b in KINDS]
FIELDS = ("ids", "weights", "common")


@cache
def built(student: str, teacher: str) -> Projection:
    return build_projection(span_tokenizer(student), span_tokenizer(teacher))


def id_of(kind: str, token: str) -> int:
    return transformers_tokenizer(kind).get_vocab()[token]


def row(found: Projection, student: int) -> dict[int, float]:
    return {i: w for i, w in zip(found.ids[student].tolist(), found.weights[student].tolist(), strict=True) if i >= 0}


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_rows_are_distributions_or_empty(pair: tuple[str, str]) -> None:
    student, teacher = (span_tokenizer(kind) for kind in pair)
    found = built(*pair)
    assert found.ids.shape == found.weights.shape == (student.size, 4)
    assert (found.ids.dtype, found.weights.dtype, found.common.dtype) == (torch.int32, torch.float32, torch.int64)
    assert int(found.ids.max()) < found.teacher_size == teacher.size
    used = found.ids >= 0
    assert torch.equal(used, found.weights > 0)
    assert (used[:, :-1] | ~used[:, 1:]).all()  # unused places are last
    assert (found.weights[:, :-1] >= found.weights[:, 1:]).all()
    sums = found.weights.double().sum(dim=1)
    torch.testing.assert_close(sums, used.any(dim=1).double(), rtol=0, atol=1e-6)
    summary = found.summary()
    assert summary["empty"] == int((sums == 0).sum())
    assert summary["exact"] + summary["one token"] + summary["several tokens"] + summary["empty"] == student.size
    for ids in found.ids.tolist():
        tokens = [i for i in ids if i >= 0]
        assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_common_tokens_spell_the_same_bytes(pair: tuple[str, str]) -> None:
    found = built(*pair)
    ours, theirs = (read_token_bytes(span_tokenizer(kind)).of_id for kind in pair)
    students, teachers = found.common.T.tolist()
    assert students == sorted(set(students))
    assert len(set(teachers)) == len(teachers)
    for s, t in zip(students, teachers, strict=True):
        assert ours[s] == theirs[t]
        assert row(found, s) == {t: 1.0}
    shared = set(filter(None, ours)) & set(filter(None, theirs))
    assert {ours[s] for s in students} - {None} == shared
    if pair[0] == pair[1]:
        assert students == teachers
        assert len(ours) - len(students) <= 1  # but for the unknown token


def test_token_bytes_agree_across_kinds() -> None:
    spelled = {"byte_bpe": "Ġthe", "unigram": "▁the", "wordpiece": "the"}
    continued = {"byte_bpe": "on", "unigram": "on", "wordpiece": "##on"}
    for tokens in (spelled, continued):
        for a, b in [("byte_bpe", "unigram"), ("byte_bpe", "wordpiece"), ("unigram", "wordpiece")]:
            for student, teacher in ((a, b), (b, a)):
                s, t = id_of(student, tokens[student]), id_of(teacher, tokens[teacher])
                assert [s, t] in built(student, teacher).common.tolist()


def test_bytes_that_are_not_utf8() -> None:
    found = built("byte_bpe", "metaspace_bpe")
    assert row(found, id_of("byte_bpe", "ä")) == {id_of("metaspace_bpe", "<0xE4>"): 1.0}
    assert row(found, id_of("byte_bpe", "a")) == {id_of("metaspace_bpe", "a"): 1.0}
    back = built("metaspace_bpe", "byte_bpe")
    a, byte = id_of("metaspace_bpe", "a"), id_of("metaspace_bpe", "<0x61>")
    assert row(back, a) == row(back, byte) == {id_of("byte_bpe", "a"): 1.0}
    assert a in back.common[:, 0]
    assert byte not in back.common[:, 0]
    same = build_projection(span_tokenizer("metaspace_bpe"), span_tokenizer("metaspace_bpe"))
    assert row(same, byte) == {byte: 1.0}


def test_several_tokens_decay() -> None:
    student, teacher = span_tokenizer("wordpiece"), span_tokenizer("byte_bpe")
    number = id_of("wordpiece", "note")
    tokens = [id_of("byte_bpe", token) for token in ("Ġno", "te")]
    for decay in (0.1, 0.5, 1.0):
        found = build_projection(student, teacher, ProjectionOptions(decay=decay))
        assert row(found, number) == pytest.approx({tokens[0]: 1 / (1 + decay), tokens[1]: decay / (1 + decay)})
    for options in (ProjectionOptions(decay=0), ProjectionOptions(k=1)):
        found = build_projection(student, teacher, options)
        assert row(found, number) == {tokens[0]: 1.0}
    assert build_projection(student, teacher, ProjectionOptions(k=1)).cut > 100


def test_a_token_that_comes_twice_has_both_weights() -> None:
    found = built("byte_bpe", "unigram")
    dash = id_of("unigram", "-")
    twice = next(r for r, s in enumerate(read_token_bytes(span_tokenizer("byte_bpe")).of_id) if s == b"----")
    assert row(found, twice) == {dash: 1.0}


def test_special_tokens_by_role_spelling_and_option() -> None:
    found = built("byte_bpe", "metaspace_bpe")
    special = [("<|end|>", "</s>"), ("<|start|>", "<s>"), ("<|turn|>", "<|turn|>")]
    for ours, theirs in special:
        assert row(found, id_of("byte_bpe", ours)) == {id_of("metaspace_bpe", theirs): 1.0}
    sides = span_tokenizer("byte_bpe"), span_tokenizer("metaspace_bpe")
    changed = build_projection(*sides, ProjectionOptions(pairs=(("<|end|>", "<|turn|>"),)))
    assert row(changed, id_of("byte_bpe", "<|end|>")) == {id_of("metaspace_bpe", "<|turn|>"): 1.0}
    assert row(changed, id_of("byte_bpe", "<|turn|>")) == {}
    with pytest.raises(MkdConfigError, match=r"--pair <\|end\|>=the: .* has no special token 'the'"):
        build_projection(*sides, ProjectionOptions(pairs=(("<|end|>", "the"),)))


def test_ordinary_tokens_that_look_like_special_ones_are_spelled_out() -> None:
    student = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(transformers_tokenizer("byte_bpe").backend_tokenizer.to_str())
    )
    student.add_tokens([AddedToken("</s>", special=False)])
    found = build_projection(SpanTokenizer(student), span_tokenizer("metaspace_bpe"), ProjectionOptions(k=8))
    tokens = row(found, student.get_vocab()["</s>"])
    assert "".join(transformers_tokenizer("metaspace_bpe").convert_ids_to_tokens(list(tokens))) == "</s>"
    assert len(tokens) > 1


@pytest.mark.parametrize(("options", "message"), [({"k": 0}, "--top-k is 0"), ({"decay": 1.5}, "--decay is 1.5")])
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(MkdConfigError, match=message):
        ProjectionOptions(**options)


def test_rebuilt_is_bit_equal(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        sides = [SpanTokenizer(transformers_tokenizer(kind)) for kind in ("byte_bpe", "unigram")]
        files.append(tmp_path / f"{number}.safetensors")
        build_projection(*sides).save(files[-1])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = built("byte_bpe", "unigram")
    hashes = found.student_hash, found.teacher_hash
    file = tmp_path / "p.safetensors"
    replace(found, options=ProjectionOptions(pairs=(("a", "b"),))).save(file)
    read = Projection.load(file, *hashes)
    assert all(torch.equal(getattr(read, name), getattr(found, name)) for name in FIELDS)
    assert (read.options.pairs, read.cut, read.teacher_size) == ((("a", "b"),), found.cut, found.teacher_size)
    with pytest.raises(MkdCacheError, match=r"--kd-projection .* is for another tokenizer of the teacher"):
        Projection.load(file, hashes[0], span_tokenizer("wordpiece").hash)
    with pytest.raises(MkdCacheError, match="is for another tokenizer of the student"):
        Projection.load(file, *hashes[::-1])
    with pytest.raises(MkdCacheError, match=r"nothing.safetensors cannot be read"):
        Projection.load(tmp_path / "nothing.safetensors", *hashes)
    with pytest.raises(MkdCacheError, match="cannot be written to"):
        found.save(tmp_path / "no folder" / "p.safetensors")
    content = file.read_bytes()
    for broken in (content[:-1], content[: len(content) // 2], content[:5], b"", json.dumps({"a": 1}).encode()):
        file.write_bytes(broken)
        with pytest.raises(MkdCacheError, match="is truncated or not a projection"):
            Projection.load(file, *hashes)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(MkdCacheError, match="is damaged"):
        Projection.load(file, *hashes)
    file.write_bytes(content)
    monkeypatch.setattr(projection_module, "VERSION", 0)
    with pytest.raises(MkdCacheError, match="has version 1, and this mkd reads version 0"):
        Projection.load(file, *hashes)


def _come_for_it(folders: list[Path], cache: Path, said: Path, start) -> None:
    sides = [SpanTokenizer(folder) for folder in folders]
    start.wait()
    projection_for(*sides, None, cache, lambda line: said.open("a").write(line + "\n"))


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    folders = [tmp_path / kind for kind in ("byte_bpe", "unigram")]
    for folder in folders:
        transformers_tokenizer(folder.name).save_pretrained(folder)
    context = fork_server()
    start = context.Barrier(8)
    cache, said = tmp_path / "cache", tmp_path / "said"
    workers = [context.Process(target=_come_for_it, args=(folders, cache, said, start)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(said.read_text().splitlines()) == 1
    assert len(list(cache.glob("*.safetensors"))) == 1
    sides = [SpanTokenizer(folder) for folder in folders]
    read = projection_for(*sides, None, cache)
    direct = build_projection(*sides)
    assert all(torch.equal(getattr(read, name), getattr(direct, name)) for name in FIELDS)
    projection_for(*sides, ProjectionOptions(decay=0.5), cache)
    assert len(list(cache.glob("*.safetensors"))) == 2


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sides = span_tokenizer("byte_bpe"), span_tokenizer("unigram")
    with pytest.raises(MkdCacheError, match=r"the projection cannot be kept in .*file"):
        projection_for(*sides, None, tmp_path / "file" / "cache")
    projection_for(*sides, None, tmp_path)
    [kept] = tmp_path.glob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(MkdCacheError, match=rf"{kept} is truncated or not a projection .*: delete the file"):
        projection_for(*sides, None, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("teacher_size", 3), ("cut", 1), ("options", {"k": 2, "decay": 0.1, "pairs": []}), ("cut", None)],
)
def test_changed_facts_are_damage(tmp_path, name, value):
    """They are covered by a checksum of their own; files of older versions have none and are read."""
    ids, weights = torch.tensor([[0, -1]], dtype=torch.int32), torch.tensor([[1.0, 0.0]])
    made = Projection(
        ids, weights, torch.zeros(0, 2, dtype=torch.int64), 7, 0, "s", "t", ProjectionOptions(k=2, decay=0.5)
    )
    path = tmp_path / "projection.safetensors"
    made.save(path)
    assert Projection.load(path, "s", "t").options == made.options
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["mkd_projection"])
    save_file(tensors, path, {"mkd_projection": json.dumps(facts | {name: value})})
    with pytest.raises(MkdCacheError, match="is damaged"):
        Projection.load(path, "s", "t")
    older = {key: value for key, value in facts.items() if key != "facts_checksum"}
    save_file(tensors, path, {"mkd_projection": json.dumps(older)})
    assert Projection.load(path, "s", "t").teacher_size == 7
