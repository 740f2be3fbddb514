"""Work of the last pipeline stage, which computes LM heads beside its layers, and the number of layers to balance it.

Counted in operations of the student's forward and backward passes. The layers of teachers are left out: they run before
the student, and their stages are even.
"""

from argparse import Namespace
from copy import copy
from dataclasses import dataclass, replace

from mkd.config.megatron.checks.parallel_sizes import has_even_stages
from mkd.data.text_size import TextSize
from mkd.job.memory import Workload, estimate, fullest
from mkd.job.memory.estimate import GIB
from mkd.report.flops import layer_flops, lm_head_flops

WORTHWHILE = 0.05
"""Share of the slowest stage's work that another division of the layers must save to be proposed."""


@dataclass(frozen=True)
class StageWork:
    """The student's training in pipeline stages. The unit of work is the forward and backward pass of one layer."""

    layers: int
    """All layers of the student; the stages divide them evenly."""
    stages: int
    """At least 2."""
    heads: float
    """Work of the LM heads on the last stage."""

    @property
    def even(self) -> int:
        """Layers of each stage if all have equally many."""
        return self.layers // self.stages

    def of_stages(self, last: int) -> tuple[float, float]:
        """(work of each other stage, work of the last stage) if the last stage has `last` layers."""
        return (self.layers - last) / (self.stages - 1), last + self.heads

    def saved(self, last: int) -> float:
        """Share of the slowest stage's work in even stages that is saved if the last stage has `last` layers."""
        return 1.0 - max(self.of_stages(last)) / max(self.of_stages(self.even))

    def proposed(self) -> int | None:
        """Layers of the last stage that save most; None if no number that Megatron accepts saves `WORTHWHILE`."""
        possible = [last for last in range(1, self.even) if (self.layers - last) % (self.stages - 1) == 0]
        best = max(possible, key=lambda last: (self.saved(last), last), default=self.even)
        return best if self.saved(best) >= WORTHWHILE else None


def stage_work(work: Workload, losses: int) -> StageWork:
    """The work of a job, as if every token had a loss.

    Args:
        work: the job; `teachers` and `served` are those whose LM heads are computed here.
        losses: number of times that the loss of a microbatch computes the student's logits.
    """
    student, kd = work.student, work.kd
    text = TextSize(student.seq_length, student.seq_length**2, student.seq_length)
    passes = 3 if work.lora is None else 2  # frozen weights have no gradients
    of_teachers = sum(lm_head_flops(one, one.seq_length) for one in (*work.teachers, *work.served))
    if kd.teachers_mode == "select":
        of_teachers *= 2  # the teachers' cross-entropy, which selects one for each text, takes a pass of its own
    heads = losses * passes * lm_head_flops(student, text.tokens) + of_teachers
    layer = (passes + _recomputed(student)) * layer_flops(student, text)
    return StageWork(student.num_layers, student.pipeline_model_parallel_size, heads / layer)


def _recomputed(student: Namespace) -> float:
    """Share of the layers whose forward pass is repeated in the backward pass; parts of layers count 0."""
    if student.recompute_granularity != "full":
        return 0.0
    if student.recompute_method == "uniform":
        return 1.0
    return min(1.0, student.recompute_num_layers * student.pipeline_model_parallel_size / student.num_layers)


def balance_text(work: Workload, losses: int) -> str | None:
    """Sentences that propose a number of layers for the last stage; None without pipeline stages, with virtual or
    uneven ones, for a student that shares the weights of its teacher, whose stages are even, and if nothing worthwhile
    is saved. Arguments as in `stage_work`."""
    student = work.student
    is_even = student.virtual_pipeline_model_parallel_size is None and has_even_stages(vars(student))
    if student.pipeline_model_parallel_size == 1 or not is_even or work.shares_teacher:
        return None
    stages = stage_work(work, losses)
    last = stages.proposed()
    if last is None:
        return None
    others, own = stages.of_stages(last)
    peak = _peak(work, last) / GIB
    return (
        f"by arithmetic for a loss on every token, the LM heads make the student's last stage as slow as "
        f"{stages.of_stages(stages.even)[1]:.1f} layers, and the others have {stages.even}; "
        f"--decoder-last-pipeline-num-layers {last} makes them {own:.1f} and {others:g}, {stages.saved(last):.0%} less "
        f"work on the slowest stage, and about {peak:.2f} GiB on the fullest rank; {_resume(student)}"
    )


def _peak(work: Workload, last: int) -> float:
    """Bytes on the fullest rank if the last stage has `last` layers."""
    student = copy(work.student)
    student.decoder_last_pipeline_num_layers = last
    return fullest(estimate(replace(work, student=student))).peak


def _resume(student: Namespace) -> str:
    if student.use_distributed_optimizer and not student.dist_ckpt_optim_fully_reshardable:
        return "a run that has begun may change to it only with --dist-ckpt-optim-fully-reshardable"
    return "a run that has begun may change to it"
