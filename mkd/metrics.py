"""What a run says about itself: a console line and JSON lines."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mkd.checkpoint.durable import replacing


def perplexity(cross_entropy: float) -> float:
    """exp of a mean cross-entropy in nats; infinity where that overflows, NaN of NaN."""
    return math.inf if cross_entropy >= 700.0 else math.exp(cross_entropy)


def clock(seconds: float) -> str:
    """A duration as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


@dataclass
class MetricsLog:
    """Writes one console line an interval and one JSON line an iteration, on the one rank that has the losses."""

    train_iters: int
    log_interval: int
    tokens_per_sample: int
    file: Path | None
    """Where JSON lines go; None for nowhere."""
    writes: bool
    """Whether this is the rank that writes: the last one, where the last pipeline stage is."""
    _started: float = field(default_factory=time.monotonic)
    _step_began: float = field(default_factory=time.monotonic)
    _first_iteration: int | None = None
    _window: list[dict[str, Any]] = field(default_factory=list)

    def start(self, iteration: int) -> None:
        """Begin at an iteration; what the file says of later ones comes from an attempt that was lost."""
        self._started = self._step_began = time.monotonic()
        self._first_iteration = iteration
        if not self.writes or self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if iteration > 0 and self.file.is_file():
            lines = self.file.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["iteration"] <= iteration]
        with replacing(self.file) as out:  # a job that is killed here loses no history
            out.writelines(kept)

    def step_begins(self) -> None:
        """Start the clock of one training step; checkpoints and evaluations in between are not its time."""
        self._step_began = time.monotonic()

    def iteration(
        self,
        iteration: int,
        losses: Mapping[str, torch.Tensor],
        *,
        samples: int,
        lr: float | None,
        grad_norm: float | None,
        skipped: bool,
        extra: Mapping[str, float],
    ) -> None:
        """Record one training iteration.

        Args:
            iteration: counted from 1.
            losses: name -> mean over the step's supervised tokens; empty on ranks that have none.
            samples: global batch size of the step.
            lr: learning rate.
            grad_norm: norm of the step's gradient before clipping.
            skipped: whether the optimizer step was skipped (overflow).
            extra: further values for the line, such as ratio and temperature.
        """
        now = time.monotonic()
        seconds = now - self._step_began
        if not self.writes:
            return
        tokens = samples * self.tokens_per_sample
        line = {
            "iteration": iteration,
            **{name: float(value) for name, value in losses.items()},
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": lr,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "elapsed_s": now - self._started,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "skipped": bool(skipped),
            **extra,
        }
        self._append(line)
        self._window.append(line)
        if iteration % self.log_interval == 0 or iteration == self.train_iters:
            print(self._console_line(iteration), flush=True)
            self._window = []

    def _console_line(self, iteration: int) -> str:
        last, window = self._window[-1], self._window
        taken = [line for line in window if not line["skipped"]]
        parts = [f"iteration {iteration}/{self.train_iters}"]
        for name in ("loss", "ce", "kd", "hidden"):
            values = [line[name] for line in taken if name in line]
            if values:
                parts.append(f"{name} {sum(values) / len(values):.4f}")
        if last["grad_norm"] is not None:
            parts.append(f"grad norm {last['grad_norm']:.3f}")
        if last["lr"] is not None:
            parts.append(f"lr {last['lr']:.2e}")
        parts += [f"R {last['ratio']:g}", f"T {last['temperature']:g}"]
        skipped = len(window) - len(taken)
        if skipped:
            parts.append(f"skipped {skipped}")
        seconds = sum(line["tokens"] / line["tokens_per_s"] for line in window)
        parts.append(f"{sum(line['tokens'] for line in window) / seconds:,.0f} tokens/s")
        parts.append(f"ETA {clock(self._eta(iteration))}")
        return " | ".join(parts)

    def _eta(self, iteration: int) -> float:
        """Seconds to the end at the mean rate so far, the evaluations and checkpoints in between included."""
        done = iteration - (self._first_iteration or 0)
        return (time.monotonic() - self._started) / max(done, 1) * (self.train_iters - iteration)

    def evaluation(
        self,
        split: str,
        iteration: int,
        losses: Mapping[str, torch.Tensor],
        calibration: Mapping[str, list[float | None]] | None = None,
    ) -> None:
        """Record an evaluation on a split (valid or test): name -> mean over the split's tokens. The student's
        perplexity, exp of that mean of its cross-entropy, is added."""
        if not self.writes or not losses:
            return
        values = {name: float(value) for name, value in losses.items()}
        values["perplexity"] = perplexity(values["ce"])
        parts = [
            f"{'validation' if split == 'valid' else split} at iteration {iteration}",
            f"ce {values['ce']:.4f} (ppl {values['perplexity']:.2f})",
        ]
        parts += [f"{name} {values[name]:.4f}" for name in ("kd", "hidden") if name in values]
        if "teacher_ce" in values:
            parts.append(f"teacher ce {values['teacher_ce']:.4f} (ppl {perplexity(values['teacher_ce']):.2f})")
        if "agreement" in values:
            parts.append(f"top-1 agreement {values['agreement']:.1%}")
        print(" | ".join(parts), flush=True)
        line: dict[str, Any] = {"iteration": iteration, **{f"{split}_{name}": v for name, v in values.items()}}
        if calibration is not None:
            line[f"{split}_calibration"] = calibration
        self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps(line) + "\n")
