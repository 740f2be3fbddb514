"""Trainings that the experiments disturb: small jobs in several layouts, each with its undisturbed result."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mkd.checkpoint.megatron.folder import TRACKER
from tests.chaos.lab import Lab
from tests.chaos.sandbox import Ended, Job, run
from tests.chaos.verdicts import EQUAL, SILENT, Verdict, last_line, metrics
from tests.e2e.test_resume import EXACT, SHARDED, tensors
from tests.support.chats import MARKED, PLAIN, talk, write_lines
from tests.support.e2e.small_job import (
    ROOT,
    SCRIPT,
    TEACHER,
    VOCAB,
    SmallJob,
    make_model,
    make_small_job,
    make_tokenizer,
    text,
)
from tests.support.hf_folders import make_model as make_random_model

STEPS = 6
SIX: dict[str, Any] = {
    "--train-iters": STEPS,
    "--lr-decay-iters": STEPS,
    "--save-interval": 2,
    "--kd-ratio": None,
    "--kd-ratio-schedule": f"linear:0.2:0.9:{STEPS}",
    "--kd-temperature-schedule": f"linear:2:1:{STEPS}",
    "--eval-iters": 1,
    "--eval-interval": 3,
    "--attention-dropout": 0.1,  # makes the random number state matter
}
PACKED: dict[str, Any] = {
    "--data-path": "{root}/chat.jsonl",
    "--kd-packing": "best_fit",
    "--kd-packing-multiple": 8,
    "--seq-length": 64,
}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}


@dataclass(frozen=True)
class Layout:
    """A row of the table of trainings."""

    ranks: int = 1
    flags: dict[str, Any] = field(default_factory=dict)


ONE_RANK = "one rank"
LAYOUTS: dict[str, Layout] = {
    ONE_RANK: Layout(),
    "DP 2": Layout(2, SHARDED),
    "PP 2": Layout(2, {"--pipeline-model-parallel-size": 2}),
    "TP 2": Layout(2, TP2),
    "CP 2, packed": Layout(2, {**PACKED, "--context-parallel-size": 2}),
    "EP 2": Layout(2, {"--kd-student-hf": "{root}/experts", "--expert-model-parallel-size": 2}),
    "cached teacher": Layout(
        1,
        {
            **PACKED,
            "--kd-teacher-hf": None,
            "--kd-teacher-cache": "{root}/targets",
            "--kd-temperature-schedule": None,
        },
    ),
    "another tokenizer": Layout(1, {**PACKED, "--kd-teacher-hf": "{root}/other", "--kd-xtoken-loss": "p_kl"}),
    "asynchronous saves": Layout(1, {"--async-save": True}),
}


class Trainings:
    """Models and data, and the undisturbed results, made when they are first needed."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.root = lab.fresh("trainings")
        self.job = make_small_job(self.root)
        self._whole: dict[str, tuple[Any, Any, float]] = {}
        _add_folders(self.job)

    def flags(self, layout: Layout, save: Path, changes: dict[str, Any] | None = None) -> list[str]:
        """The command line of a training that saves to, and resumes from, one folder."""
        short = {"--global-batch-size": 2} if self.lab.is_small else {}  # one microbatch per step
        whole = {**SIX, **short, "--save": save, "--load": save, **layout.flags, **(changes or {})}
        return [str(SCRIPT), *(word.replace("{root}", str(self.root)) for word in self.job.flags(whole))]

    def start(
        self, layout: Layout, save: Path, changes: dict[str, Any] | None = None, streams: Path | None = None
    ) -> Job:
        """One attempt, in the background; `streams` is the folder of its output, by default beside `save`."""
        return Job(self.flags(layout, save, changes), streams or save.with_name("streams"), layout.ranks).start()

    def whole(self, name: str, changes: dict[str, Any] | None = None) -> tuple[Any, Any, float]:
        """Metrics, tensors and seconds of an undisturbed training."""
        key = name + json.dumps(changes or {}, default=str)
        if key not in self._whole:
            if "targets" in str(LAYOUTS[name].flags) and not (self.root / "targets").exists():
                self._write_cache()
            save = self.lab.fresh(f"whole/{len(self._whole)}") / "save"
            ended = self.start(LAYOUTS[name], save, changes).wait(120)
            assert ended.status == 0, ended.output[-2000:] + ended.errors[-3000:]
            self._whole[key] = training_lines(save), tensors(save), ended.seconds
            assert [line["iteration"] for line in self._whole[key][0]] == list(range(1, STEPS + 1))
        return self._whole[key]

    def compare(
        self, name: str, save: Path, changes: dict[str, Any] | None = None, *, has_metrics: bool = True
    ) -> Verdict:
        """Compare a finished training with the undisturbed one, bit for bit: metrics, weights, optimizer.

        has_metrics: False if the folder lost the lines of earlier steps.
        """
        lines, state, _ = self.whole(name, changes)
        if (save / TRACKER).read_text() != str(STEPS):
            return Verdict(SILENT, f"the tracker names {(save / TRACKER).read_text()}")
        seen = training_lines(save)
        lines = lines if has_metrics else lines[len(lines) - len(seen) :]
        if seen != lines:
            wrong = next(
                (pair for pair in zip(seen, lines, strict=False) if pair[0] != pair[1]), (len(seen), len(lines))
            )
            return Verdict(SILENT, f"metrics: {wrong[0]} instead of {wrong[1]}")
        found = tensors(save)
        wrong = [key for key in state if key not in found or not torch.equal(state[key], found[key])]
        if wrong or found.keys() != state.keys():
            return Verdict(SILENT, f"tensors differ: {wrong[:3]}")
        return Verdict(EQUAL)

    def _write_cache(self) -> None:
        """Targets of the teacher for every text of the chats."""
        changes = {**PACKED, "--train-iters": 40, "--lr-decay-iters": 40, "--eval-iters": 20}
        words = [word.replace("{root}", str(self.root)) for word in self.job.flags(changes)]
        tool = ROOT / "tools" / "cache_teacher.py"
        ended = run([tool, "write", "--out", self.root / "targets", "--top-k", 8, "--", *words], self.root / "s", 120)
        assert ended.status == 0, ended.output[-2000:] + ended.errors[-3000:]


def _add_folders(job: SmallJob) -> None:
    """A student with experts, a teacher with another tokenizer, conversations."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": VOCAB, "num_hidden_layers": 2}
    make_random_model(job.root / "experts", "mixtral", **sizes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(job.student / file, job.root / "experts")
    make_model(job.root / "other", make_tokenizer(411, "many words in another order " * 9 + text()[::2]), 3, TEACHER)
    for folder, template in ((job.student, MARKED), (job.teacher, MARKED), (job.root / "other", PLAIN)):
        (folder / "chat_template.jinja").write_text(template)
    draw, words = random.Random(0), text().split()
    chats = [talk(*(" ".join(draw.choices(words, k=draw.randrange(2, 12))) for _ in range(2))) for _ in range(60)]
    write_lines(job.root / "chat.jsonl", [{"messages": messages} for messages in chats])


def training_lines(save: Path) -> list[dict[str, Any]]:
    """Training records of the metrics, without times."""
    lines = metrics(save / "metrics.jsonl")
    return [
        {key: line[key] for key in EXACT if key in line} for line in lines if "grad_norm" in line or "broken" in line
    ]


def describe(ended: Ended) -> str:
    return f"status {ended.statuses}, {last_line(ended)[:160]}"
