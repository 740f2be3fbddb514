"""Measure answers: their length, how much they repeat themselves, and how probable the teacher finds them.

    python examples/on_policy/smollm2/score.py --teacher runs/smollm2/teacher runs/smollm2/written/answers.jsonl

The files are those of answers.py. The perplexity is exp of the teacher's mean cross-entropy over all tokens of all
answers, in fp32, end tokens included.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from answers import load
from torch.nn import functional
from transformers import PreTrainedModel

from mkd.errors import MkdDataError, MkdError
from mkd.rollout.facts import GRAM, repeated_share
from mkd.rollout.interface import WrittenText

Answer = tuple[list[int], WrittenText]
"""Token ids of the prompt, and the answer."""
BATCH = 16
COLUMNS = {"tokens": "{:.1f}", "ended": "{:.0%}", "repeated": "{:.1%}", "different": "{:.1%}", "perplexity": "{:.1f}"}
"""Name of a measurement -> its format in a table."""


def read_answers(path: str) -> list[Answer]:
    """Answers of a file.

    Raises:
        MkdDataError: the file has none, or lacks the token ids.
    """
    if not Path(path).is_file():
        raise MkdDataError(f"{path} does not exist: write it with answers.py")
    records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if not records or not all(record.get("prompt_tokens") and record.get("answer_tokens") for record in records):
        raise MkdDataError(f"{path} has no answers, or answers without token ids: write it with answers.py")
    return [
        (record["prompt_tokens"], WrittenText(tuple(record["answer_tokens"]), record["ended"])) for record in records
    ]


@torch.inference_mode()
def cross_entropies(teacher: PreTrainedModel, answers: Sequence[Answer]) -> list[float]:
    """Mean cross-entropy of the tokens of each answer, in nats."""
    found = []
    for start in range(0, len(answers), BATCH):
        batch = answers[start : start + BATCH]
        texts = [[*prompt, *answer.tokens] for prompt, answer in batch]
        longest = max(map(len, texts))
        # Padding at the end: no token of a text sees it.
        rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=teacher.device)
        hidden = teacher.model(input_ids=rows, use_cache=False).last_hidden_state
        for states, text, (prompt, _) in zip(hidden, texts, batch, strict=True):
            logits = teacher.lm_head(states[len(prompt) - 1 : len(text) - 1]).float()
            labels = torch.tensor(text[len(prompt) :], device=logits.device)
            found.append(functional.cross_entropy(logits, labels).item())
    return found


def different_share(texts: Sequence[WrittenText]) -> float:
    """Share of the runs of four tokens that occur for the first time in all answers together."""
    grams = [text.tokens[start : start + GRAM] for text in texts for start in range(len(text.tokens) - GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def score(teacher: PreTrainedModel, answers: Sequence[Answer]) -> dict[str, float]:
    """Mean number of tokens, share of answers that have ended, repetition, and the teacher's perplexity."""
    texts = [answer for _, answer in answers]
    tokens = [len(text.tokens) for text in texts]
    total = sum(ce * count for ce, count in zip(cross_entropies(teacher, answers), tokens, strict=True))
    return {
        "answers": len(texts),
        "tokens": sum(tokens) / len(texts),
        "ended": sum(text.ended for text in texts) / len(texts),
        "repeated": repeated_share(texts),
        "different": different_share(texts),
        "perplexity": math.exp(total / sum(tokens)),
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    """Measurements of several sets of answers as a markdown table."""
    names = ("tokens", "ended", "repeated 4-grams", "different 4-grams of all answers", "teacher's perplexity")
    lines = [f"| answers of | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name, found in rows.items():
        values = (form.format(found[column]) for column, form in COLUMNS.items())
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", nargs="+", metavar="FILE")
    parser.add_argument("--teacher", required=True, metavar="DIR")
    args = parser.parse_args()
    try:
        files = {path: read_answers(path) for path in args.answers}
        teacher, _ = load(args.teacher, "--teacher")
        print(table({path: score(teacher, answers) for path, answers in files.items()}))
    except MkdError as error:
        print(f"score: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
