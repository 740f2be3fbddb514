"""Tokenizers that differ in names of control tokens only, and those that differ in ordinary text."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkd.checkpoint import tokenizer_hash as module
from mkd.checkpoint.source import ModelSource, common_vocabulary
from mkd.checkpoint.tokenizer_difference import TokenizerDifference, tokenizer_difference
from mkd.checkpoint.tokenizer_hash import tokenizer_hash
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.job.tokenizers import sort_teachers
from mkd.utils.json_files import parse_json

FLAGS = ("--kd-student-hf", "--kd-teacher-hf")


def added(token_id: int, content: str, special: bool = True) -> dict[str, Any]:
    return {"id": token_id, "content": content, "special": special}


BASE = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3},
        "merges": ["a b"],
        "unk_token": None,
        "byte_fallback": False,
    },
    "added_tokens": [added(3, "<s>"), added(4, "<|im_start|>"), added(5, "<|im_end|>")],
}
"""As Qwen2.5: the control tokens are behind the vocabulary, <s> in it as well."""


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    content = copy.deepcopy(BASE)
    change(content)
    return content


def write(folder: Path, content: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def difference(tmp_path: Path, content: dict[str, Any]) -> TokenizerDifference:
    return tokenizer_difference(write(tmp_path / "a", BASE), write(tmp_path / "b", content), FLAGS)


def test_equal_files_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher and student of one family; files that differ in spaces only have equal hashes too."""
    content = changed(lambda content: content["added_tokens"].append(added(6, "<|once|>")))
    folders = [write(tmp_path / name, content) for name in ("teacher", "student", "spaced")]
    (folders[2] / "tokenizer.json").write_text(json.dumps(content, indent=1))
    parsed: list[bytes] = []
    monkeypatch.setattr(module, "parse_json", lambda text: parsed.append(text) or parse_json(text))
    first, *others = (tokenizer_hash(folder, FLAGS[0]) for folder in folders)
    assert others == [first, first]
    assert len(parsed) == 2


def rename_in_vocabulary(content: dict[str, Any]) -> None:
    del content["model"]["vocab"]["<s>"]
    content["model"]["vocab"]["<begin>"] = 3
    content["added_tokens"][0] = added(3, "<begin>")


NAMES = {
    "renamed, as in R1's distillations": (
        lambda c: c["added_tokens"].__setitem__(1, added(4, "<\uff5cUser\uff5c>")),
        {4: ("<|im_start|>", "<\uff5cUser\uff5c>")},
    ),
    "renamed in the vocabulary too": (rename_in_vocabulary, {3: ("<s>", "<begin>")}),
    "added, as in Qwen3": (
        lambda c: c["added_tokens"].extend([added(6, "<think>", special=False), added(7, "[TOOL]", special=False)]),
        {6: (None, "<think>"), 7: (None, "[TOOL]")},
    ),
    "removed": (lambda c: c["added_tokens"].pop(), {5: ("<|im_end|>", None)}),
    "moved": (
        lambda c: c["added_tokens"].__setitem__(slice(1, 3), [added(4, "<|im_end|>"), added(5, "<|im_start|>")]),
        {4: ("<|im_start|>", "<|im_end|>"), 5: ("<|im_end|>", "<|im_start|>")},
    ),
    "written otherwise": (
        lambda c: c.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{**BASE["pre_tokenizer"], "trim_offsets": False}]},
            model={**BASE["model"], "merges": [["a", "b"]], "dropout": None},
            post_processor={"type": "ByteLevel"},
            added_tokens=[*BASE["added_tokens"], added(6, "<x>")],
        ),
        {6: (None, "<x>")},
    ),
}
ORDINARY = {
    "tokens": (lambda c: c["model"]["vocab"].update({"ab": 1, "b": 2}), "2 ordinary tokens differ, the first is id 1"),
    "one more token": (lambda c: c["model"]["vocab"].update(abb=6), "1 ordinary token differs, the first is id 6"),
    "added text": (lambda c: c["added_tokens"].append(added(6, "    ", special=False)), "id 6 (none / '    ')"),
    "special space": (lambda c: c["added_tokens"].append(added(6, "  ")), "id 6 (none / '  ')"),
    "text in place of a control token": (
        lambda c: c["added_tokens"].__setitem__(1, added(4, "hello", special=False)),
        "id 4 ('<|im_start|>' / 'hello')",
    ),
    "merges": (lambda c: c["model"].update(merges=["b a"]), "the merges of the two differ"),
    "normalizer": (lambda c: c.update(normalizer=None), "the normalizer of the two differ"),
    "pre-tokenizer": (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "the pre-tokenizer of"),
    "options": (lambda c: c["model"].update(ignore_merges=True), "the options of the two differ"),
    "model": (lambda c: c["model"].update(type="WordLevel"), "the models are BPE and WordLevel"),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_only(tmp_path: Path, case: str) -> None:
    change, names = NAMES[case]
    found = difference(tmp_path, changed(change))
    assert found.is_in_names_only and found.names == names
    assert tokenizer_hash(tmp_path / "a", "") != tokenizer_hash(tmp_path / "b", "")


@pytest.mark.parametrize("case", ORDINARY)
def test_ordinary_text_differs(tmp_path: Path, case: str) -> None:
    change, text = ORDINARY[case]
    found = difference(tmp_path, changed(change))
    assert not found.is_in_names_only and text in str(found)


def test_unigram_scores_count(tmp_path: Path) -> None:
    def unigram(score: float, name: str) -> dict[str, Any]:
        model = {"type": "Unigram", "vocab": [[name, 0.0], ["a", score]], "unk_id": 0}
        return {"model": model, "added_tokens": [added(0, name)]}

    first = write(tmp_path / "a", unigram(-1.0, "<unk>"))
    assert tokenizer_difference(first, write(tmp_path / "b", unigram(-1.0, "<UNK>")), FLAGS).names == {
        0: ("<unk>", "<UNK>")
    }
    assert "1 ordinary token" in str(tokenizer_difference(first, write(tmp_path / "c", unigram(-2.0, "<unk>")), FLAGS))


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    found = difference(tmp_path, changed(lambda c: c["added_tokens"].extend(added(i, f"<{i}>") for i in range(6, 20))))
    assert str(found).startswith("14 control tokens differ: id 6 (none / '<6>'), 7 (")
    assert str(found).endswith("13 (none / '<13>') and 6 more")


DAMAGED = [
    {"added_tokens": [{"id": 1}]},
    {"model": [], "added_tokens": []},
    {"model": 3},
    {"model": {"type": "BPE", "vocab": {"a": "b"}}},
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(MkdCheckpointError, match=r"--kd-teacher-hf .*b: tokenizer.json is damaged"):
        difference(tmp_path, content)


def source(folder: Path, vocab: int = 8) -> ModelSource:
    known = tokenizer_hash(folder, "")
    return ModelSource(f"--kd-teacher-hf {folder}", folder, {}, vocab, known, folder, lambda: "", lambda *load: None)


def config(**options: Any) -> KDConfig:
    return KDConfig(teacher_hf=["T"], ratio=0.5, **options)


def test_the_flag_accepts_other_names(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = write(tmp_path / "a", BASE)
    teacher = source(write(tmp_path / "b", changed(NAMES["added, as in Qwen3"][0])), vocab=9)
    student = ("--kd-student-hf S", 8, tokenizer_hash(first, ""))
    with pytest.raises(MkdConfigError, match=r"6 \(none / '<think>'\), 7 .* give --kd-same-tokenizer .*--kd-xtoken"):
        sort_teachers(config(), *student, teacher, first)
    assert sort_teachers(config(same_tokenizer=True), *student, teacher, first) == ([], 8)
    printed = capsys.readouterr().out
    assert "2 control tokens differ: id 6 (none / '<think>')" in printed
    assert sort_teachers(config(xtoken_loss="p_kl"), *student, teacher, first) == ([teacher], 8)


def test_the_flag_accepts_nothing_else(tmp_path: Path) -> None:
    first = write(tmp_path / "a", BASE)
    other = source(write(tmp_path / "b", changed(ORDINARY["merges"][0])))
    student = ("--kd-student-hf S", 8, tokenizer_hash(first, ""))
    with pytest.raises(MkdConfigError, match="the merges of the two differ; --kd-same-tokenizer accepts only"):
        sort_teachers(config(same_tokenizer=True), *student, other, first)
    with pytest.raises(MkdConfigError, match=r"compares the tokenizer.json of two folders"):
        common_vocabulary(*student, other, folder=None, renamed_control_tokens=True)
