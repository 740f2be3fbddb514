"""State of a run that is stored with its checkpoints, beside what Megatron stores."""

from argparse import Namespace
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass
class RunState:
    """State that a run carries from step to step and over restarts.

    A checkpoint holds it among Megatron's arguments, as `kd_<field>`; `write_to` is the only writer of these names.
    """

    resume_from: str | None = None
    """Folder of the checkpoint that the job continues from, such as .../iter_0000100; None starts at step 0."""
    teacher_fingerprint: str | None = None
    """Hash of the teacher's config and weights; None if no teacher has run so far."""
    unfinished_evaluation: bool = False
    """True if a signal or a time limit ended the evaluation after the last step: the resumed job starts with it."""
    balance_factor: float = 1.0
    """Factor of KD in the next step with --kd-balance; equal on all ranks."""
    data_fingerprints: list[str] | None = None
    """Hash of each file of the training data, in the order of the blend; None in checkpoints of earlier versions."""
    tokenizer_fingerprints: list[str] | None = None
    """Hash of each tokenizer that divides texts while the data or prompts are read, with its chat template: the
    student's, then those of teachers with other tokenizers. None without such texts, and in earlier versions."""
    prompts_fingerprint: str | None = None
    """Hash of the file of --kd-prompts; None without the flag, and in checkpoints of earlier versions."""
    tasks_fingerprint: str | None = None
    """Hash of the file of --kd-eval-tasks; None without the flag, and in checkpoints of earlier versions."""
    base_fingerprint: str | None = None
    """Hash of the frozen weights under adapters; None if all weights are trained."""
    rollout: dict[str, Any] | None = None
    """Texts that the student has written for several steps (`mkd.rollout.on_policy`): their key, the iteration and the
    token ids; None without them."""
    runaway_rollouts: tuple[int, ...] = ()
    """Iterations, counted from 1, of the latest consecutive rollouts above a threshold of --kd-rollout-guard: as many
    as the guard needs (`mkd.rollout.guard`)."""

    @property
    def resumes(self) -> bool:
        """True if the weights come from the checkpoint in --load, not from --kd-student-hf or a random start."""
        return self.resume_from is not None

    @classmethod
    def read_from(cls, args: Namespace) -> "RunState":
        """The state in a checkpoint's arguments; defaults for fields that an older checkpoint lacks."""
        stored = {field.name: getattr(args, f"kd_{field.name}", field.default) for field in fields(cls)}
        state = cls(**stored)
        if not isinstance(state.rollout, dict | None):
            state.rollout = None
        if not isinstance(state.runaway_rollouts, tuple) or not all(type(one) is int for one in state.runaway_rollouts):
            state.runaway_rollouts = ()
        return state

    def without_texts(self) -> "RunState":
        """The state without written texts, as trackers record it."""
        return replace(self, rollout=None)

    def write_to(self, args: Namespace) -> None:
        """Store the state in Megatron's arguments, which the next checkpoint holds."""
        for field in fields(self):
            setattr(args, f"kd_{field.name}", getattr(self, field.name))
