"""Run a training of pretrain_kd.py with Model-Optimizer's distillation for megatron-core in place of mkd's.

    torchrun --nproc-per-node 2 benchmarks/train_modelopt.py FLAGS --kd-ratio 0

FLAGS are those of pretrain_kd.py. Data, weights, parallel layout, optimizer and training loop are the same. The teacher
has the student's layout; its forward pass precedes the student's in each microbatch. The loss is the CE of
megatron-core plus `LogitsKLLoss` of all logits at once, scaled to the same magnitude (`skip_lm_loss=False`); the
metrics `loss` and `ce` are their sum. --kd-ratio 0 disables mkd's own teacher. Pipeline parallelism is not supported.
"""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from torch import Tensor, nn

from mkd.cli.job_process import exit_status_of_rank, prepare
from mkd.errors import MkdConfigError, is_correctable
from mkd.report.start_times import StartTimes


def run() -> None:
    """Parse the command line, build the job's parts, train."""
    start = StartTimes()
    prepare(sys.argv[1:])
    # These import megatron, which `prepare` prepares.
    from mkd.distributed.groups import Groups
    from mkd.job.job import Job
    from mkd.job.launch import build, train
    from mkd.job.plan.plan import print_plan

    job = Job.from_command_line()
    if not job.kd.is_plain_pretraining:
        raise MkdConfigError("--kd-ratio is not 0: Model-Optimizer computes the distillation here; give --kd-ratio 0")
    if (stages := job.args.pipeline_model_parallel_size) > 1:
        raise MkdConfigError(f"--pipeline-model-parallel-size {stages}: not supported here; remove it")
    if find_spec("modelopt") is None:
        raise MkdConfigError("package modelopt is missing: pip install nvidia-modelopt")
    print_plan(job)
    parts = build(job, start)
    teacher = job.teacher.build(Groups.from_megatron()).model
    job.student_config.pre_wrap_hooks.append(partial(_convert, teacher))
    _replace_loss()
    train(job, parts)


def _convert(teacher: nn.Module, chunks: list[nn.Module]) -> list[nn.Module]:
    """Make the student a `DistillationModel`, before megatron wraps it."""
    import modelopt.torch.distill as mtd
    from modelopt.torch.distill.plugins.megatron import (
        DistillationConfig,
        adjust_distillation_model_for_mcore,
        setup_distillation_config,
    )

    (student,) = chunks
    config = setup_distillation_config(DistillationConfig(skip_lm_loss=False), student.config, teacher.config)
    options = {"teacher_model": teacher, "criterion": config.criterion, "loss_balancer": config.loss_balancer}
    model = mtd.convert(student, mode=[("kd_loss", options)])
    adjust_distillation_model_for_mcore(model, config)
    return [model]


def _replace_loss() -> None:
    """Report Model-Optimizer's loss where a training without a teacher reports the student's CE."""
    from megatron.core.utils import unwrap_model

    from mkd.train.step import ForwardStep, Report, StepInput

    forward, report = ForwardStep.__call__, ForwardStep._report_pretraining
    models: list[nn.Module] = []

    def call(self: ForwardStep, inputs: object, model: nn.Module) -> object:
        models[:] = [unwrap_model(model)]
        return forward(self, inputs, model)

    def report_sum(self: ForwardStep, step: StepInput, ce: Tensor) -> Report:
        return report(self, step, _loss(models[0], ce, step.batch.ce_mask))

    ForwardStep.__call__, ForwardStep._report_pretraining = call, report_sum


def _loss(model: nn.Module, ce: Tensor, mask: Tensor) -> Tensor:
    """Model-Optimizer's mean loss of a microbatch, for each of its tokens.

    Args:
        model: a `DistillationModel` after its forward pass.
        ce: [b, s] of the student.
        mask: [b, s], 0 for tokens that are not supervised.
    """
    from megatron.core import parallel_state

    count = mask.sum().clamp(min=1)

    def reduce(losses: Tensor | tuple[Tensor, bool, bool]) -> Tensor:
        if isinstance(losses, Tensor):
            return (losses * mask).sum() / count
        per_token, is_partial, _ = losses
        own = (per_token * mask).sum() / count
        if not is_partial:
            return own
        total = own.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return own + (total - own.detach())  # the gradient is that of this rank's vocabulary shard

    return model.compute_kd_loss(student_loss=reduce(ce), loss_reduction_fn=reduce)["kd_loss"].expand_as(ce)


if __name__ == "__main__":
    sys.exit(exit_status_of_rank(run, is_correctable))
