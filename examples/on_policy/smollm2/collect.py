"""Collect the answers and metrics of run.sh in one JSON file, print tables, and write some answers side by side.

python collect.py runs/smollm2 --teacher TEACHER --methods given written --out results.json --samples samples.md
"""

import argparse
import html
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from answers import load
from score import Answer, read_answers, score, table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mkd.errors import MkdDataError, MkdError, visible
from mkd.report.run_log import RunLog
from mkd.rollout.interface import WrittenText

LABELS = {
    "text": "text alone (CE)",
    "given": "given texts, forward KL",
    "given_reverse": "given texts, reverse KL",
    "written": "written texts, reverse KL",
    "mixed": "half given, half written, reverse KL",
}
"""Method -> its name in tables and figure."""
SHOWN_QUESTIONS = 4

Samples = dict[int, list[dict]]
"""Iteration -> the greedy answers of --kd-sample-prompts."""


def read_samples(metrics: Path) -> Samples:
    """Greedy answers at each evaluation.

    Raises:
        MkdDataError: the metrics hold none.
    """
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    records = [json.loads(line) for line in lines if '"samples": [' in line]
    if not records:
        raise MkdDataError(f"{metrics} has no answers to --kd-sample-prompts: see the log of the training")
    return {record["iteration"]: record["samples"] for record in records}


def as_answers(samples: Sequence[dict], tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Samples as token ids. The metrics have texts: ids are those that the tokenizer gives them."""
    found = []
    for sample in samples:
        prompt, text = (tokenizer.encode(sample[key], add_special_tokens=False) for key in ("prompt", "text"))
        tokens = [*text, tokenizer.eos_token_id] if sample["ended"] else text
        if tokens:
            found.append((prompt, WrittenText(tuple(tokens), sample["ended"])))
    return found


def training(folder: Path, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Curves and totals of one training, and its answers at the end.

    Raises:
        MkdDataError: the training has written no metrics, or there are no answers of its student.
    """
    log, samples = RunLog.read(str(folder / "metrics.jsonl")), read_samples(folder / "metrics.jsonl")
    found = {
        "steps": log.curve("step_s")[0][-1],
        "tokens": sum(log.curve("tokens")[1]),
        "greedy": {it: score(teacher, as_answers(texts, tokenizer)) for it, texts in sorted(samples.items())},
        "sampled": score(teacher, read_answers(str(folder / "answers.jsonl"))),
    }
    for name in (
        "valid_ce",
        "valid_teacher_ce",
        "valid_kd",
        "written_tokens",
        "written_cut_off",
        "written_repeated",
        "kd",
    ):
        if log.curve(name)[0]:
            found[name] = dict(zip(*log.curve(name), strict=True))
    for name in ("step_s", "rollout_s"):
        if values := log.curve(name)[1]:
            found[f"median_{name}"] = statistics.median(values)
    return found


def collect(runs: Path, methods: Sequence[str], teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict:
    """All trainings that have ended."""
    data = runs / "data"
    found = {
        "texts": sum(1 for _ in (data / "train.jsonl").open("rb")),
        "teacher": {
            "sampled": score(teacher, read_answers(str(data / "teacher.held_out.jsonl"))),
            "greedy": score(teacher, read_answers(str(data / "teacher.greedy.jsonl"))),
        },
        "pruned": score(teacher, read_answers(str(runs / "pruned/answers.jsonl"))),
        "start": training(runs / "start", teacher, tokenizer),
        "methods": {},
    }
    for method in methods:
        try:
            found["methods"][method] = training(runs / method, teacher, tokenizer)
        except MkdError as error:
            print(f"collect: {method} is left out: {error}", file=sys.stderr)
    return found


def summary(found: dict) -> str:
    """Tables of the sampled and of the greedy answers, and of the trainings."""

    def final(name: str, kind: str) -> dict[str, float]:
        run = found["start"] if name == "start" else found["methods"][name]
        return run[kind] if kind == "sampled" else run[kind][max(run[kind])]

    students = {"student before the methods": "start", **{LABELS[name]: name for name in found["methods"]}}
    greedy = found["start"]["greedy"]
    parts = []
    for kind, pruned in (("sampled", found["pruned"]), ("greedy", greedy[min(greedy)])):
        rows = {"teacher": found["teacher"][kind], "student, pruned only": pruned}
        parts += [
            f"{kind} answers",
            "",
            table(rows | {label: final(name, kind) for label, name in students.items()}),
            "",
        ]
    parts += [
        "| training | updates | tokens | seconds per update, median | of these writing |",
        "|---|---|---|---|---|",
    ]
    for label, name in students.items():
        run = found["start"] if name == "start" else found["methods"][name]
        seconds = (f"{run.get(key, 0.0):.2f}" for key in ("median_step_s", "median_rollout_s"))
        parts.append(f"| {label} | {run['steps']} | {run['tokens']:,.0f} | {' | '.join(seconds)} |")
    return "\n".join(parts)


def side_by_side(runs: Path, methods: Sequence[str], count: int) -> str:
    """Greedy answers of all models to the first questions, as markdown."""
    start = read_samples(runs / "start/metrics.jsonl")
    columns = {"student, pruned only": start[min(start)], "student before the methods": start[max(start)]}
    for method in methods:
        samples = read_samples(runs / method / "metrics.jsonl")
        columns[LABELS[method]] = samples[max(samples)]
    records = (runs / "data/teacher.greedy.jsonl").read_text(encoding="utf-8").splitlines()
    teacher = {
        messages[-2]["content"]: messages[-1]["content"] for messages in (json.loads(r)["messages"] for r in records)
    }
    lines = []
    for index in range(min(count, len(start[min(start)]))):
        prompt = columns["student, pruned only"][index]["prompt"]
        question = next(question for question in teacher if question in prompt)
        texts = {"teacher": teacher[question]} | {name: samples[index]["text"] for name, samples in columns.items()}
        lines += [f"**{question}**", "", *(f"- {name}: {one_line(text)}" for name, text in texts.items()), ""]
    return "\n".join(lines)


def one_line(text: str) -> str:
    """A written text as one line, without HTML and without characters that control a terminal."""
    return html.escape(visible(" ".join(text.split())), quote=False)


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--teacher", required=True, metavar="DIR")
    parser.add_argument("--form", default="small", help="form of run.sh, noted in the file")
    parser.add_argument("--methods", nargs="+", required=True, choices=LABELS)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--samples", type=Path, required=True, metavar="FILE", help="answers side by side, markdown")
    args = parser.parse_args()
    try:
        found = {"form": args.form, **collect(args.runs, args.methods, *load(args.teacher, "--teacher"))}
        args.samples.write_text(side_by_side(args.runs, list(found["methods"]), SHOWN_QUESTIONS), encoding="utf-8")
    except MkdError as error:
        print(f"collect: {error}", file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
