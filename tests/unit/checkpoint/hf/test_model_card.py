"""mkd/checkpoint/hf/model_card.py: the records of a run that somebody else made are text in one line."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mkd.checkpoint.hf.model_card import model_card


def card_of(folder: Path, run: Any, lines: list[Any] = []) -> str | None:  # noqa: B006
    (folder / "kd_config.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stored = SimpleNamespace(
        save_dir=folder, iteration_dir=folder / "iter_0000002", args=Namespace(data_path=["/private/text"])
    )
    return model_card(stored, "student")


def test_markup_is_escaped(tmp_path: Path) -> None:
    text = card_of(tmp_path, {"plan": {"teacher": "4 | layers\n<script>x</script> [a](b) `c`\x1b[2J"}})
    row = next(line for line in text.splitlines() if line.startswith("| teacher"))
    assert row == "| teacher | 4 \\| layers &lt;script&gt;x&lt;/script&gt; \\[a](b) \\`c\\`\\x1b\\[2J |"
    assert "/private" not in text


@pytest.mark.parametrize("plan", [[], 3, "x", {"loss": 5}, {"loss": None}, {"teacher": {"a": 1}}, None])
def test_other_types_leave_fields_out(tmp_path: Path, plan: Any) -> None:
    lines = [
        {"iteration": 1, "loss": 10**400, "tokens": "many"},
        {"iteration": 2, "ce": True, "kd": 1.5},
        {"iteration": "3"},
        [4],
    ]
    text = card_of(tmp_path, {"plan": plan}, lines)
    assert "| `kd` | 1.5000 |" in text and "`loss`" not in text and "tokens" not in text


def test_folders_of_other_tools_have_no_card(tmp_path: Path) -> None:
    assert card_of(tmp_path, [1]) is None
