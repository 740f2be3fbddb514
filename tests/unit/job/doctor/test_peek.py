"""The doctor's look into data: text, targets between signs and in color, rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from mkd.checkpoint.source import PositionLimit
from mkd.job.doctor.peek import CONTEXT, TARGET, first_samples, painted, peek, rows_of, too_long
from tests.support.chats import PLAIN, chat_tokenizer, talk, write_lines
from tests.support.e2e.small_job import write_data


def job(packing: str = "none", folder: str | None = None, longest: int | None = None) -> SimpleNamespace:
    kd = SimpleNamespace(
        packing=packing, packing_multiple=4, long_samples="split", data_format="auto", bad_records="error"
    )
    kind = "NullTokenizer" if folder is None else "HuggingFaceTokenizer"
    args = SimpleNamespace(seq_length=32, seed=1, tokenizer_type=kind, tokenizer_model=folder)
    limit = None if longest is None else PositionLimit(longest, "the teacher --kd-teacher-hf T")
    return SimpleNamespace(kd=kd, args=args, data=SimpleNamespace(position_limit=limit))


def test_documents_are_targets(tmp_path):
    samples = first_samples(str(write_data(tmp_path / "text", [[1, 2, 3], [4, 5]])), None)
    assert [ids.tolist() for ids, _ in samples] == [[1, 2, 3], [4, 5]]
    assert all(targets.all() for _, targets in samples)
    assert painted(samples[0], None, most=2).plain == "[[1 2]]  ... (3 tokens)"


def test_what_the_assistant_says_is_painted(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", PLAIN)
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": talk("what is it?", "an import")}] * 3)
    (sample, *_) = first_samples(str(file), str(tmp_path / "tokenizer"))
    text = painted(sample, tokenizer, most=999)
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles["[[an import<|end|>]]"] == TARGET
    assert next(style for part, style in styles.items() if "what is it?" in part) == CONTEXT
    said: list[str] = []
    peek(job(folder=str(tmp_path / "tokenizer")), [str(file)], 1, 999, lambda text: said.append(str(text)), said.append)
    assert said[0] == f"{file}:" and "[[an import<|end|>]]" in said[1]
    assert said[2].endswith("of the first 3 samples are targets") and not said[2].startswith("100")
    assert "one per row" in said[-1]


@pytest.mark.parametrize("packing, last", [("best_fit", "3 samples packed: 2 rows, 75.0%"), ("none", "3 rows, 50.0%")])
def test_rows(packing, last):
    samples = [(np.arange(n), np.ones(n, dtype=bool)) for n in (13, 17, 21)]
    lines = rows_of(samples, job(packing))
    assert last in lines[-1]
    assert lines[0].endswith("of 32 positions") and lines[0].startswith("row 0: ")


def test_packed_samples_are_cut_to_the_positions_of_the_models():
    samples = [(np.arange(n), np.ones(n, dtype=bool)) for n in (13, 31)]
    assert rows_of(samples, job("best_fit", longest=19))[:2] == [
        "row 0: 14 + 16 of 32 positions",
        "row 1: 12 of 32 positions",
    ]
    assert rows_of(samples, job("none", longest=19))[0].startswith("row 0: 12 of 32")
    text = too_long("chats.jsonl", samples, job("best_fit", longest=19))
    assert text is not None and text.startswith(
        "chats.jsonl: 1 of the first 2 samples are longer than the 16 positions of the teacher --kd-teacher-hf T (19, "
        "in multiples of 4) (rows have 32) and are split (--kd-long-samples): "
    )
    assert too_long("chats.jsonl", samples[:1], job("best_fit", longest=19)) is None
    assert too_long("chats.jsonl", samples, job("best_fit")) is too_long("x", samples, job("none", longest=19)) is None
