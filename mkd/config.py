"""What a run of mkd is asked to do: frozen dataclasses, one field for each `--kd-*` flag.

The docstring under a field is that flag's `--help` text. Everything that can be checked without reading a file is
checked when the object is made.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from mkd.errors import MkdConfigError

Divergence = Literal["forward_kl"]
"""Divergences between teacher p and student q, both softmax(logits / T)."""


def _require_choice(flag: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise MkdConfigError(f"{flag} is {value!r}; legal values are {', '.join(map(repr, choices))}")


def _require_temperature(flag: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise MkdConfigError(f"{flag} is {value}; a temperature must be a finite number > 0")


def _require_ratio(flag: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise MkdConfigError(
            f"{flag} is {value}; a ratio must be in [0, 1] (0: cross-entropy only, 1: distillation only)"
        )


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Which divergence is minimised, and at which temperature."""

    divergence: Divergence = "forward_kl"
    """forward_kl is KL(p || q), with p the teacher and q the student."""

    temperature: float = 1.0
    """T > 0: both softmaxes are taken of logits / T."""

    temperature_squared: bool = True
    """Multiply the divergence by T^2, in value and gradient, so that its gradient keeps its size as T grows
    (Hinton et al. 2015, section 2)."""

    def __post_init__(self) -> None:
        _require_choice("--kd-loss", self.divergence, get_args(Divergence))
        _require_temperature("--kd-temperature", self.temperature)

    @property
    def scale(self) -> float:
        """The factor in front of the divergence: T^2, or 1."""
        return self.temperature**2 if self.temperature_squared else 1.0


@dataclass(frozen=True)
class Schedule:
    """A value that changes over training iterations."""

    shape: Literal["constant", "linear", "cosine"]
    start: float
    end: float
    steps: int

    @classmethod
    def constant(cls, value: float) -> "Schedule":
        return cls("constant", value, value, 1)

    @classmethod
    def parse(cls, flag: str, text: str) -> "Schedule":
        """Read `linear:START:END:STEPS` or `cosine:START:END:STEPS`."""
        shape, *numbers = text.split(":")
        try:
            start, end, steps = float(numbers[0]), float(numbers[1]), int(numbers[2])
        except (IndexError, ValueError):
            start = end = steps = None
        if shape not in ("linear", "cosine") or len(numbers) != 3 or steps is None or steps < 1:
            raise MkdConfigError(
                f"{flag} is {text!r}; write constant, linear:START:END:STEPS or cosine:START:END:STEPS, with STEPS >= 1"
            )
        return cls(shape, start, end, steps)

    def value(self, iteration: int) -> float:
        """The value at an iteration counted from 0; END from iteration STEPS on."""
        done = min(max(iteration / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * done

    def __str__(self) -> str:
        if self.shape == "constant":
            return f"{self.start:g}"
        return f"{self.shape} from {self.start:g} to {self.end:g} over {self.steps} iterations"


@dataclass(frozen=True, kw_only=True)
class KDConfig:
    """Knowledge distillation: where the teacher comes from and what is learned from it."""

    teacher_hf: str | None = None
    """Teacher: a Hugging Face folder (config.json and safetensors). Its architecture is read from its own config.json.
    Exactly one teacher source must be given."""

    teacher_load: str | None = None
    """Teacher: a Megatron checkpoint folder (torch_dist). Its architecture is read from the arguments stored in it.
    Exactly one teacher source must be given."""

    student_hf: str | None = None
    """Initial student weights, architecture and vocabulary from a Hugging Face folder: no size flags are needed, and
    one that contradicts the folder is an error. A checkpoint in --load goes before it, so the same command line
    resumes."""

    ratio: float | None = None
    """R in [0, 1]: loss = (1 - R) * CE + R * T^2 * KD. CE is not computed at R = 1 and KD not at R = 0. Required,
    unless --kd-ratio-schedule gives it."""

    ratio_schedule: str = "constant"
    """R over iterations: constant, linear:START:END:STEPS or cosine:START:END:STEPS."""

    loss: Divergence = "forward_kl"
    """Divergence between teacher p and student q. forward_kl: KL(p || q)."""

    temperature: float = 1.0
    """T > 0: teacher and student logits are divided by T in the divergence (never in CE)."""

    temperature_schedule: str = "constant"
    """T over iterations: constant, linear:START:END:STEPS or cosine:START:END:STEPS."""

    temperature_squared: bool = True
    """Do not multiply the divergence by T^2."""

    loss_chunk_rows: int | None = None
    """Tokens whose logits exist at one time in the loss. Default: as many as keep one chunk of fp32 logits under 256
    MiB."""

    teacher_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of the teacher's weights and forward pass. Default: the student's."""

    teacher_offload: bool = False
    """Keep the teacher's weights in host memory while the student trains: the teacher runs over all microbatches of a
    step first, then makes room."""

    metrics_file: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "FILE"}})
    """JSON lines, one an iteration (iteration, loss, ce, kd, grad_norm, lr, tokens, tokens_per_s, elapsed_s);
    validation lines carry valid_ names. Default: metrics.jsonl in the --save folder."""

    dry_run: bool = False
    """Check flags, teacher, student, data and layout, print the plan, and exit without training."""

    def __post_init__(self) -> None:
        sources = {"--kd-teacher-hf": self.teacher_hf, "--kd-teacher-load": self.teacher_load}
        given = [f"{flag} {value}" for flag, value in sources.items() if value is not None]
        if len(given) != 1:
            seen = " and ".join(given) or "none"
            raise MkdConfigError(
                f"exactly one teacher source is needed, got {seen}: give one of {' or '.join(sources)}"
            )
        self._check_ratio()
        self._check_temperature()
        _require_choice("--kd-loss", self.loss, get_args(Divergence))
        if self.loss_chunk_rows is not None and self.loss_chunk_rows < 1:
            raise MkdConfigError(f"--kd-loss-chunk-rows is {self.loss_chunk_rows}; it must be at least 1")

    def _check_ratio(self) -> None:
        if self.ratio_schedule == "constant":
            if self.ratio is None:
                raise MkdConfigError("--kd-ratio is required: loss = (1 - R) * CE + R * T^2 * KD, with R in [0, 1]")
            _require_ratio("--kd-ratio", self.ratio)
            return
        if self.ratio is not None:
            raise MkdConfigError(
                f"--kd-ratio {self.ratio} and --kd-ratio-schedule {self.ratio_schedule} both set R: give one of them"
            )
        schedule = Schedule.parse("--kd-ratio-schedule", self.ratio_schedule)
        _require_ratio("START of --kd-ratio-schedule", schedule.start)
        _require_ratio("END of --kd-ratio-schedule", schedule.end)

    def _check_temperature(self) -> None:
        _require_temperature("--kd-temperature", self.temperature)
        if self.temperature_schedule == "constant":
            return
        if self.temperature != 1.0:
            raise MkdConfigError(
                f"--kd-temperature {self.temperature} and --kd-temperature-schedule {self.temperature_schedule} both "
                "set T: give one of them"
            )
        schedule = Schedule.parse("--kd-temperature-schedule", self.temperature_schedule)
        _require_temperature("START of --kd-temperature-schedule", schedule.start)
        _require_temperature("END of --kd-temperature-schedule", schedule.end)

    @property
    def ratio_over_time(self) -> Schedule:
        if self.ratio_schedule == "constant":
            return Schedule.constant(self.ratio)
        return Schedule.parse("--kd-ratio-schedule", self.ratio_schedule)

    @property
    def temperature_over_time(self) -> Schedule:
        if self.temperature_schedule == "constant":
            return Schedule.constant(self.temperature)
        return Schedule.parse("--kd-temperature-schedule", self.temperature_schedule)

    @property
    def is_plain_pretraining(self) -> bool:
        """Whether R is 0 for the whole run, so that nothing is learned from the teacher."""
        ratio = self.ratio_over_time
        return ratio.start == 0.0 and ratio.end == 0.0

    def loss_spec(self, iteration: int) -> LossSpec:
        """The loss at an iteration counted from 0."""
        return LossSpec(
            divergence=self.loss,
            temperature=self.temperature_over_time.value(iteration),
            temperature_squared=self.temperature_squared,
        )
