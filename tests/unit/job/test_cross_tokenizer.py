"""Written texts of a job whose teacher has another tokenizer."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mkd.config.kd_config import KDConfig
from mkd.data.sources.prompts import ON_POLICY, has_conversations, read_prompts
from mkd.errors import MkdDataError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.xtoken.text.tokenize_and_align import TextAligner
from mkd.xtoken.vocabulary.build import build_projection
from tests.support.chats import PLAIN, chat_tokenizer, talk, write_lines
from tests.support.e2e.small_job import END, make_tokenizer, save_tokenizer, text

SOURCE: Any = None


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> CrossTokenizers:
    root = tmp_path_factory.mktemp("cross")
    chat_tokenizer(root / "student", PLAIN)
    save_tokenizer(make_tokenizer(411, text()[::2]), root / "teacher")
    (root / "teacher/chat_template.jinja").write_text(PLAIN.replace("<|start|>", "<|turn|>"))
    encoder = TextAligner((str(root / "student"), str(root / "teacher")), ("--tokenizer-model", "--kd-teacher-hf"))
    kd = KDConfig(teacher_hf=["T"], ratio=1.0, xtoken_loss="partition_kl", on_policy=1.0, prompts="P")
    found = build_projection(*encoder.tokenizers)
    return CrossTokenizers(Namespace(seq_length=96), kd, (SOURCE,), encoder, (found,), (72,), 307)


def test_rows_of_written_texts(cross: CrossTokenizers, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": "The import"}, {"messages": talk("it")}])
    student = cross.encoder.tokenizers[0].tokenizer
    prompts = read_prompts(str(file), student, 90, ON_POLICY)
    views = cross.written_views(prompts)
    assert [one.row_length for one in (views.layout.student, *views.layout.teachers)] == [96, 72]
    (view,) = views.aligner.views
    assert [one.is_chat for one in view.prompts] == [False, True] and view.prompts[1].text.endswith(
        "<|turn|>assistant\n"
    )
    assert view.names == view.chat_names == {student.eos_token_id: END} and view.pairs is None and view.most == 73
    other = replace(cross, kd=replace(cross.kd, xtoken_loss="p_kl")).written_views(prompts)
    assert other.aligner.views[0].pairs == ((student.eos_token_id, view.tokenizer.tokenizer.eos_token_id),)
    short = replace(cross, row_lengths=(16,))
    with pytest.raises(MkdDataError, match=r"line 2: the prompt has \d+ tokens for --kd-teacher-hf .*at most 17 with"):
        short.written_views(prompts)


def test_prompts_that_are_conversations(tmp_path: Path) -> None:
    """They decide which special tokens are equivalent; lines that are refused later do not matter."""
    lines = {"p": ['{"prompt": "a"}', "{", "\xff"], "c": ["x", "", '{"messages": []}']}
    for name, content in lines.items():
        (tmp_path / name).write_bytes("\n".join(content).encode("latin-1"))
        assert has_conversations(str(tmp_path / name)) == (name == "c")
    with pytest.raises(MkdDataError, match=r"--kd-prompts .*none does not exist"):
        has_conversations(str(tmp_path / "none"))


def test_ends_without_a_counterpart(cross: CrossTokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("mkd.job.cross_tokenizer.logger.warning", warnings.append)
    end = cross.encoder.tokenizers[0].tokenizer.eos_token_id
    cross.warn_of_ends(frozenset({end, 3}))
    assert warnings == []
    cross.warn_of_ends(frozenset({3}))
    assert len(warnings) == 1 and "teacher has no token like" in warnings[0] and "--kd-projection" in warnings[0]
