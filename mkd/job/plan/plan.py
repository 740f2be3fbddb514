"""The plan of a job: a summary that is printed before it trains."""

import logging
from argparse import Namespace

import torch

from mkd import cpu
from mkd.checkpoint.source import compare_tokenizers
from mkd.config.kd_config import KDConfig
from mkd.config.loss_spec import divergence_text
from mkd.config.megatron.epochs import iterations_are_unknown
from mkd.config.megatron.layouts import has_own_layout
from mkd.job.data import number_of_iterations
from mkd.job.epochs import set_iterations
from mkd.job.job import Job
from mkd.job.plan.launch_bound import student_launches, teacher_launches
from mkd.job.plan.memory_table import memory_line, offload_line, print_memory, workload
from mkd.job.plan.pipeline_balance import balance_text
from mkd.job.plan.rollout import rollout_plan
from mkd.job.plan.warnings import job_warnings
from mkd.job.teachers.model import shape_of
from mkd.job.tokenizers import folder_of_tokenizer
from mkd.losses.inputs import MAX_FP32_TEMPERATURE
from mkd.models.delta_rule import missing_kernel
from mkd.models.gated_delta_net import VARIANT
from mkd.report.flops import peak_tflops
from mkd.utils.logging import logger

WARNING = "warning"
"""Label of the plan's line of `job_warnings`."""


def print_plan(job: Job) -> None:
    """Log the plan, on rank 0."""
    if job.kd.dry_run and cpu.is_target():
        logger.info("plan and memory are for CPU, where this machine would run the job; mkd doctor estimates for GPUs")
    for name, text in plan(job).items() if job.args.rank == 0 else ():
        logger.log(logging.WARNING if name == WARNING else logging.INFO, f"{name:10s} {text}")


def dry_run(job: Job) -> None:
    """Print the memory table and check the data, beyond the plan, if no training follows."""
    print_memory(job)
    if job.args.rank == 0:
        set_iterations(job.args, job.kd, job.data, job.resume_point)
    job.data.check_all()
    kept = "nothing but tokens in the data cache" if job.data.has_own_rows else "nothing"
    logger.info(f"checked: no problem was found, {kept} was written")


def plan(job: Job) -> dict[str, str]:
    """Job summary, label -> text."""
    args, kd = job.args, job.kd
    weights = "random"
    if job.lora is not None:
        weights = f"{job.student_source.path}, frozen{', shared with the teacher' if job.shares_teacher else ''}"
    elif job.state.resumes:
        weights = f"checkpoint {job.state.resume_from}"
    elif job.student_source is not None:
        weights = str(job.student_source.path)
    elif args.pretrained_checkpoint is not None:
        weights = args.pretrained_checkpoint
    return {
        "teacher": str(job.teacher),
        "student": f"{shape_of(job.student_config)}, {_name(args.params_dtype)}, weights: {weights}",
        "loss": f"(1 - R) CE + R {'B ' if kd.balance else ''}{_divergence(kd)}, R = {kd.ratio_over_time}, "
        + f"T = {kd.temperature_over_time}"
        + (", B = CE / KD of the step before" if kd.balance else "")
        + (f", z-loss {kd.z_loss:g}" if kd.z_loss else "")
        + (f", of {job.teacher.target_description}" if job.teacher.target_description else "")
        + f", computed by {implementation_text(kd, job.loss_options.impl)}"
        + (_without_teacher(args.padded_vocab_size - job.true_vocab) if kd.is_plain_pretraining else ""),
        **({"tokenizers": str(job.cross)} if job.cross is not None else {}),
        **_renamed_tokens(job),
        **_layers(job),
        **_adapters(job),
        **_delta_nets(job),
        **_experts(job),
        **_routers(job.args),
        "layout": _layout(args, args.world_size),
        **_teacher_layouts(job),
        **_stages(job),
        **_launches(job),
        **({"rows": _rows(job)} if job.data.has_own_rows else {}),
        "batch": f"{args.global_batch_size} rows of {args.seq_length} tokens, microbatch {args.micro_batch_size}",
        "steps": f"{kd.epochs:g} epoch{'s' * (kd.epochs != 1.0)}"
        if iterations_are_unknown(args)
        else f"{number_of_iterations(args)} iterations",
        "rate": learning_rate(args),
        **rollout_plan(args, kd),
        "vocabulary": f"{job.true_vocab} tokens, padded to {args.padded_vocab_size}",
        **({"changed": "; ".join(job.notes)} if job.notes else {}),
        **({WARNING: "; ".join(found)} if (found := job_warnings(job)) else {}),
        **({"offload": offload_line(job)} if kd.rollout_offload else {}),
        "memory": memory_line(job),
    }


def learning_rate(args: Namespace) -> str:
    """The schedule of the learning rate in words. A decay to 0 in a straight line is Megatron's default."""
    schedule = f"{args.lr:g}, {args.lr_decay_style}"
    if args.lr_decay_style != "constant":
        schedule += f" decay to {args.min_lr:g}"
    for end, unit in ((args.lr_decay_iters, "iteration"), (args.lr_decay_samples, "sample")):
        if end is not None:
            schedule += f" at {unit} {end}"
    if args.lr_warmup_fraction is not None:
        return f"{schedule}, warmup over {args.lr_warmup_fraction:g} of that"
    for number, unit in ((args.lr_warmup_iters, "iterations"), (args.lr_warmup_samples, "samples")):
        if number:
            schedule += f", warmup over {number} {unit}"
    return schedule


def _layout(args: Namespace, ranks: int) -> str:
    """Layout of the student or of a teacher, from its Megatron arguments and the number of ranks."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    sizes = {
        "DP": ranks // (tp * pp * cp),
        "TP": tp,
        "PP": pp,
        "VPP": args.virtual_pipeline_model_parallel_size or 1,
        "CP": cp,
        "EP": args.expert_model_parallel_size,
    }
    listed = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP"]
    return ", ".join(listed + ["SP"] * args.sequence_parallel)


def _teacher_layouts(job: Job) -> dict[str, str]:
    """Layouts of teachers that have their own."""
    own = [_layout(model, job.args.world_size) for model in job.teacher.models if has_own_layout(model, job.args)]
    return {"teacher's": "layout " + "; ".join(dict.fromkeys(own))} if own else {}


def _stages(job: Job) -> dict[str, str]:
    """A better division of the student's layers among pipeline stages, if there is one."""
    losses = 1 if job.kd.is_plain_pretraining else len(job.teacher.sources)
    text = balance_text(workload(job), losses)
    return {} if text is None else {"stages": text}


def _launches(job: Job) -> dict[str, str]:
    """Flags for models that wait for the host, on a GPU whose rate is known."""
    tflops = None if cpu.is_target() else peak_tflops(torch.cuda.get_device_name())
    if tflops is None:
        return {}
    teachers = () if job.kd.is_plain_pretraining else job.teacher.models
    texts = [teacher_launches(teacher, job.args, job.kd, tflops) for teacher in teachers]
    texts.append(student_launches(job.args, job.kd, tflops))
    found = list(dict.fromkeys(text for text in texts if text is not None))
    return {"launches": "; ".join(found)} if found else {}


def _rows(job: Job) -> str:
    kd = job.kd
    how = "one sample each" if kd.packing == "none" else f"packed, padded to multiples of {kd.packing_multiple}"
    limits = [layout.limit for layout in job.data.row_layouts if layout.is_limited]
    longer = f"those longer than {' or '.join(limits)}" if limits else "longer ones"
    return f"{how}; {longer} are {'split' if kd.long_samples == 'split' else 'dropped'}; KD on {kd.mask}"


def _divergence(kd: KDConfig) -> str:
    """The divergence as it is in the loss and in the reported kd."""
    text = divergence_text(kd.loss, kd.beta, kd.skew)
    if not kd.temperature_squared:
        return f"{text} (without T^2)"
    ends = {kd.temperature_over_time.start, kd.temperature_over_time.end}
    return f"T^2 {text}" + ("" if ends == {1.0} else " (kd is shown with its T^2)")


def implementation_text(kd: KDConfig, implementation: str) -> str:
    """The implementation of the loss: only eager has the float64 of high temperatures."""
    temperatures = (kd.temperature_over_time.start, kd.temperature_over_time.end)
    if implementation == "eager" or max(temperatures) <= MAX_FP32_TEMPERATURE:
        return implementation
    first = "" if min(temperatures) > MAX_FP32_TEMPERATURE else f"{implementation}, and by "
    return f"{first}eager in float64, which is slower, while T is above {MAX_FP32_TEMPERATURE:g}"


def _without_teacher(padding: int) -> str:
    """The loss of a run with R = 0; `padding`: columns of the vocabulary without a token."""
    columns = f", and CE is Megatron's own, over the {padding} padding columns too" if padding else ""
    return f"; R is 0: the teacher is not run{columns}"


def _renamed_tokens(job: Job) -> dict[str, str]:
    """Differences that --kd-same-tokenizer accepts, by teacher."""
    if not job.kd.same_tokenizer:
        return {}
    folder = folder_of_tokenizer(job.args, job.student_source)
    found = ((one, compare_tokenizers(folder, one)) for one in job.teacher.sources)
    texts = [f"{one.path}: {difference}" for one, difference in found if difference is not None and difference.names]
    return {"same ids": "; ".join(texts)} if texts else {}


def _layers(job: Job) -> dict[str, str]:
    kd, pairs = job.kd, ", ".join(map(str, job.kd.layer_pairs))
    widths = [args.hidden_size for args in (job.args, *job.teacher.models)]
    maps = "" if len(set(widths)) == 1 else f", mapped from width {widths[0]} to {widths[1]}"
    text = f"+ R {kd.hidden_loss_weight:g} {kd.hidden_loss_type} of layers {pairs} (student:teacher){maps}"
    return {"layers": text} if pairs else {}


def _adapters(job: Job) -> dict[str, str]:
    """The adapters of --kd-lora and where their first values come from."""
    if job.lora is None:
        return {}
    origin = "new" if job.lora.first is None else job.kd.student_hf
    if job.state.resumes:
        origin = f"checkpoint {job.state.resume_from}"
    count = job.lora.parameters / 1e6
    return {"adapters": f"{job.lora.options}, on {' '.join(job.lora.modules)}: {count:,.1f}M parameters; {origin}"}


def _delta_nets(job: Job) -> dict[str, str]:
    """Models whose gated delta nets have no kernel on the job's GPUs, by the reason."""
    models = [("student", job.args, True), *(("teacher", one, False) for one in job.teacher.models)]
    reasons: dict[str, list[str]] = {}
    for name, args, is_trained in models:
        if args.experimental_attention_variant == VARIANT and not cpu.is_target():
            reason = missing_kernel(is_trained, args.deterministic_mode)
            reasons.setdefault(reason or "", []).append(name)
    slow = [f"{' and '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items() if reason]
    return {"delta nets": "in PyTorch's operations, slower than kernels; " + "; ".join(slow)} if slow else {}


def _experts(job: Job) -> dict[str, str]:
    """Models on GPUs whose routed experts are computed one after another."""
    models = [("student", job.args), *(("teacher", one) for one in job.teacher.models)]
    slow = [name for name, args in models if args.num_experts is not None and not args.moe_grouped_gemm]
    if not slow or cpu.is_target():
        return {}
    names = " and ".join(dict.fromkeys(slow))
    return {"experts": f"{names}: one after another; --moe-grouped-gemm computes those of a rank together, faster"}


def _routers(args: Namespace) -> dict[str, str]:
    """Losses and rules that train the student's routers beside the objective, also where no flag gives them."""
    if args.num_experts is None:
        return {}
    kinds, coefficients = (
        value if isinstance(value, list) else [value]
        for value in (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff)
    )
    texts = [
        f"+ {coefficient:g} {kind} (--moe-aux-loss-coeff)"
        for kind, coefficient in zip(kinds, coefficients, strict=False)
        if kind.endswith("aux_loss") and coefficient
    ]
    if args.moe_z_loss_coeff:
        texts.append(f"+ {args.moe_z_loss_coeff:g} z-loss (--moe-z-loss-coeff)")
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate:
        rate = f"{args.moe_router_bias_update_rate:g} (--moe-router-bias-update-rate)"
        texts.append(f"each step moves the biases of experts by {rate} toward equal loads")
    return {"routers": "; ".join(texts)} if texts else {}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
