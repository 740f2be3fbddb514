"""The measurements of an evaluation, in several layouts, against plain float64 definitions on one rank."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from mkd.distributed.groups import Groups
from mkd.job.training_loop import Hooks, TrainingParts
from mkd.losses import LossOptions, reference
from mkd.report.calibration import calibration_error
from mkd.report.start_times import StartTimes
from mkd.teacher.online import OnlineTeacher
from mkd.train.evaluation import BINS
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from tests.support.dist.kd_samples import ROW, ROWS, VOCAB, microbatches
from tests.support.dist.kd_step import Layout, Models, build_student, build_teacher, parallel_state
from tests.support.dist.pool import Pool

MODELS = Models(masks="differ", ratio=0.3, temperature=2.0, teacher_is_student=True)
LAYOUTS = {
    "one": Layout(),
    "tp2 sp": Layout(tp=2, sp=True),
    "cp2": Layout(cp=2),
    "dp2": Layout(mbs=1),
    "pp2": Layout(pp=2),
}
BYTES = torch.arange(VOCAB) % 4  # a quarter of the tokens is not text
RELATIVE = 2e-5
"""fp32 against float64 from the same fp32 logits, and layouts against each other."""


class Log:
    """Takes what MetricsLog does."""

    writes = True

    def start(self, iteration: int) -> None: ...

    def step_begins(self) -> None: ...

    def evaluation(self, split: str, iteration: int, losses: dict, calibration: dict | None) -> None:
        self.seen = ({name: float(value) for name, value in losses.items()}, calibration)


def models_of(layout: Layout, models: Models, groups: Groups) -> tuple[OnlineTeacher, list[torch.nn.Module]]:
    """A teacher that is sure of itself, and a student that is the teacher with smaller layers."""
    teacher, chunks = build_teacher(layout, models, groups), build_student(layout, models, groups)
    for model in (teacher._model, *chunks):
        for name, parameter in model.named_parameters():
            if "final_layernorm" in name:
                parameter.data.mul_(3.0)
            if "linear_fc2" in name and model is not teacher._model:
                parameter.data.mul_(0.5)
    return teacher, chunks


def evaluate(rank: int, world_size: int, layout: Layout, models: Models) -> tuple[dict, dict] | None:
    """The whole global batch as megatron evaluates it; (name -> mean, calibration table) on the last stage."""
    with parallel_state(layout):
        groups = Groups.from_megatron()
        teacher, chunks = models_of(layout, models, groups)
        schedule, log = TeacherThenStudent(models.kd, groups, teacher, VOCAB, lambda: 0), Log()
        job = SimpleNamespace(kd=models.kd, args=SimpleNamespace(cuda_graph_impl="none"), samples=None, tasks=None)
        options = LossOptions(chunk_rows=5)
        step = ForwardStep(LossContext(groups, VOCAB, options, byte_lengths=BYTES))
        hooks = Hooks(job, TrainingParts([], step, schedule, log, StartTimes()))
        batches = microbatches(models.data, layout.cp, layout.mbs, groups.dp.rank(), groups.dp.size(), models.masks)
        totals: dict[str, Tensor] = {}
        run = hooks.around(get_forward_backward_func(pp_size=layout.pp, vp_size=None))
        half = len(batches) // 2
        for part in (batches[:half], batches[half:]):  # two iterations of an evaluation
            with torch.no_grad():
                reports = run(
                    forward_step_func=step,
                    data_iterator=iter(part),
                    model=chunks,
                    num_microbatches=len(part),
                    seq_length=ROW,
                    micro_batch_size=layout.mbs,
                    forward_only=True,
                )
            for name in reports[0] if reports else ():
                total = torch.vstack([report[name] for report in reports]).sum(dim=0)
                torch.distributed.all_reduce(total, group=groups.dp_cp)
                totals[name] = totals.get(name, 0.0) + total
        if not groups.is_last_stage:
            return None
        hooks.after_evaluation("valid", 1, {name: total[0] / total[1] for name, total in totals.items()}, chunks)
        return log.seen


def logits(rank: int, world_size: int, models: Models) -> dict[str, Tensor]:
    """Both models' logits [rows, VOCAB], labels and masks of the global batch, flat."""
    with parallel_state(Layout()):
        teacher, chunks = models_of(Layout(), models, Groups.from_megatron())
        (batch,) = microbatches(models.data, 1, ROWS, 0, 1, models.masks)
        found = {}
        for name, model in (("student", unwrap_model(chunks[0])), ("teacher", teacher._model)):
            with torch.no_grad():
                whole = model(batch["tokens"], batch["position_ids"], None)
            found[name] = whole.flatten(0, 1)[:, :VOCAB].double()
        return found | {name: batch[name].flatten() for name in ("labels", "loss_mask", "kd_mask")}


def definitions(found: dict[str, Tensor], models: Models) -> tuple[dict[str, float], dict[str, list]]:
    """The expected measurements of an evaluation."""
    student, teacher, labels = found["student"], found["teacher"], found["labels"]
    ce_mask, kd_mask = found["loss_mask"].double(), found["kd_mask"].double()

    def mean(values: Tensor, mask: Tensor) -> float:
        return float((values * mask).sum() / mask.sum())

    ce, teacher_ce = (reference.cross_entropy(z, labels) for z in (student, teacher))
    kd = reference.forward_kl(student, teacher, models.kd.loss_spec(0))
    agreement = reference.top1_agreement(student, teacher)
    lengths = BYTES[labels] * ce_mask
    means = {
        "ce": mean(ce, ce_mask),
        "teacher_ce": mean(teacher_ce, ce_mask),
        "kd": mean(kd, kd_mask),
        "agreement": mean(agreement, kd_mask),
        "student_entropy": mean(reference.entropy(student), kd_mask),
        "teacher_entropy": mean(reference.entropy(teacher), kd_mask),
        "bits_per_byte": float((ce * (lengths > 0)).sum() / math.log(2) / lengths.sum()),
        "teacher_bits_per_byte": float((teacher_ce * (lengths > 0)).sum() / math.log(2) / lengths.sum()),
    }
    # Each iteration of an evaluation has an objective of its own, as training steps do; the loss is their mean.
    parts = torch.arange(len(labels)).chunk(2)
    objectives = [
        (1 - models.ratio) * mean(ce[part], ce_mask[part]) + models.ratio * mean(kd[part], kd_mask[part])
        for part in parts
    ]
    means["loss"] = sum(o * float(ce_mask[part].sum()) for o, part in zip(objectives, parts, strict=True))
    means["loss"] /= float(ce_mask.sum())
    table: dict[str, list] = {"tokens": [], "share": [], "teacher": [], "student": [], "agreement": []}
    p, q = reference.top_probabilities(student, teacher)
    for low in range(BINS):
        inside = (kd_mask > 0) & (p >= low / BINS) & (p < (low + 1) / BINS)
        table["tokens"].append(float(inside.sum()))
        table["share"].append(float(inside.sum() / kd_mask.sum()))
        for name, values in (("teacher", p), ("student", q), ("agreement", agreement)):
            table[name].append(mean(values, inside.double()) if inside.any() else None)
    return means, table


@pytest.fixture(scope="module")
def expected(gloo_pool: Callable[[int], Pool]) -> tuple[dict[str, float], dict[str, list]]:
    means, table = definitions(gloo_pool(1).run(logits, MODELS)[0], MODELS)
    assert sum(share > 0 for share in table["share"]) > 2  # it is a test of bins only if several are used
    assert 0.0 < means["agreement"] < 1.0
    return means, table


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_definitions(gloo_pool: Callable[[int], Pool], expected: Any, name: str) -> None:
    layout = LAYOUTS[name]
    ranks = 1 if layout == Layout() else 2
    seen = [result for result in gloo_pool(ranks).run(evaluate, layout, MODELS) if result is not None]
    assert len(seen) == ranks // layout.pp
    for means, table in seen:
        assert means == pytest.approx(expected[0], rel=RELATIVE)
        assert table.keys() == expected[1].keys()
        for column, values in table.items():
            wanted = [math.nan if value is None else value for value in expected[1][column]]
            values = [math.nan if value is None else value for value in values]
            assert values == pytest.approx(wanted, rel=RELATIVE, abs=1e-7, nan_ok=True), column


def test_calibration_error() -> None:
    table = {"share": [0.25, 0.0, 0.75], "teacher": [0.1, None, 0.9], "student": [0.2, None, 0.5]}
    assert calibration_error(table) == pytest.approx(0.25 * 0.1 + 0.75 * 0.4)
