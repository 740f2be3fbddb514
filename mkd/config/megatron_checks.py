"""Checks of Megatron's flags against each other and the model, which megatron itself makes late, unclearly or never."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from megatron.core.transformer.enums import AttnBackend

from mkd import cpu
from mkd.config.kd_config import KDConfig, LayerPair
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.epochs import iterations_are_unknown
from mkd.config.megatron.fp8_teacher import MIN_FP8_CAPABILITY
from mkd.errors import MkdConfigError, MkdPackageError

REQUIRED: dict[str, tuple[tuple[str, ...], str]] = {
    "--num-layers": (("num_layers",), "the student's size; or give --kd-student-hf"),
    "--seq-length": (("seq_length",), "tokens per sample"),
    "--micro-batch-size": (("micro_batch_size",), "samples that a rank computes at once"),
    "--train-iters": (("train_iters", "train_samples"), "iterations to train; or give --train-samples or --kd-epochs"),
    "--lr": (("lr",), "peak learning rate"),
    "--eval-interval": (("eval_interval",), "iterations between evaluations; of any size with --eval-iters 0"),
}
"""Flag without a sensible default -> (arguments of which one must be given, meaning)."""


def check_required(args: Namespace, flag: str) -> None:
    """Refuse a command line that lacks a flag of `REQUIRED`."""
    names, meaning = REQUIRED[flag]
    value = None
    for name in names:
        value = value or getattr(args, name)
    if value is None:
        raise MkdConfigError(f"{flag} is missing ({meaning})")


def check_intervals(args: Namespace) -> None:
    """Refuse intervals and numbers of iterations below 1, and a save folder without the interval of its checkpoints."""
    if args.eval_interval < 1:
        raise MkdConfigError(f"--eval-interval is {args.eval_interval}; it must be at least 1 (--eval-iters 0: never)")
    if args.eval_iters < 0:
        raise MkdConfigError(
            f"--eval-iters is {args.eval_iters}; it must be at least 0, which never evaluates. An evaluation of the "
            "whole validation set is the number of its rows divided by --global-batch-size (the plan prints the rows)"
        )
    for flag in ("--log-interval", "--tensorboard-log-interval", "--train-iters", "--train-samples", "--save-interval"):
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value < 1:
            raise MkdConfigError(f"{flag} is {value}; it must be at least 1")
    if args.save is not None and not (args.save_interval or args.save_retain_interval):
        raise MkdConfigError(f"--save {args.save} needs --save-interval (iterations between checkpoints)")


def check_alternatives(args: Namespace) -> None:
    """Refuse lengths in iterations beside others in samples, and two sources of data; megatron's messages name no
    flag."""
    unit, other = ("iters", "samples") if args.train_iters else ("samples", "iters")
    lengths = {f"--{name}-{other}": getattr(args, f"{name.replace('-', '_')}_{other}") for name in _LENGTHS}
    if (beside := next((f"{flag} {value}" for flag, value in lengths.items() if value), None)) is not None:
        length = f"--train-{unit} {getattr(args, f'train_{unit}')}"
        if iterations_are_unknown(args):
            length = "--kd-epochs, which sets --train-iters"
        raise MkdConfigError(
            f"{beside} and {length}: lengths are all in iterations or all in samples: leave one of them out"
        )
    parts = [f"--{name}-data-path" for name in ("train", "valid", "test") if getattr(args, f"{name}_data_path")]
    sources = ["--mock-data"] * args.mock_data + ["--data-path"] * bool(args.data_path) + parts[:1]
    if len(sources) > 1:
        raise MkdConfigError(f"{' and '.join(sources)} are two sources of data: leave one of them out")


_LENGTHS = ("train", "lr-decay", "lr-warmup")


def check_learning_rate(args: Namespace) -> None:
    """Refuse a learning-rate or weight-decay schedule that megatron would refuse only after the models are loaded."""
    unit = "iters" if args.train_iters else "samples"
    steps, decay_flag = getattr(args, f"lr_decay_{unit}"), f"--lr-decay-{unit}"
    if steps is None:
        steps, decay_flag = getattr(args, f"train_{unit}"), f"--train-{unit}"
    warmup = getattr(args, f"lr_warmup_{unit}")
    if warmup >= steps:
        raise MkdConfigError(f"--lr-warmup-{unit} {warmup} must be below {decay_flag} {steps}")
    for flag, value in (("--min-lr", args.min_lr), ("--lr-warmup-init", args.lr_warmup_init)):
        if not 0.0 <= value <= args.lr:
            raise MkdConfigError(f"{flag} {value:g} must lie between 0 and --lr {args.lr:g}")
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise MkdConfigError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise MkdConfigError(
            "--override-opt-param-scheduler (this command's schedule) contradicts --use-checkpoint-opt-param-scheduler "
            "(the checkpoint's): give one of them"
        )


def _check_keep_best(args: Namespace, metric: str) -> None:
    """Refuse to compare checkpoints that are not saved or not evaluated."""
    what = f"--kd-keep-best is {metric}"
    if args.save is None:
        raise MkdConfigError(f"{what}, but there is no folder to save in: give --save")
    if args.ckpt_format != "torch_dist":
        raise MkdConfigError(f"--kd-keep-best needs --ckpt-format torch_dist, not {args.ckpt_format}")
    if args.eval_iters == 0:
        raise MkdConfigError(f"{what}, and --eval-iters is 0: nothing is evaluated")
    if args.save_interval and args.save_interval % args.eval_interval:
        raise MkdConfigError(
            f"{what}, and --save-interval {args.save_interval} is not a multiple of --eval-interval "
            f"{args.eval_interval}: each checkpoint needs an evaluation"
        )


def _check_format(args: Namespace, kd: KDConfig) -> None:
    """Refuse formats of checkpoints whose state of distillation a resumed job does not read."""
    if args.ckpt_format == "torch" and (args.save is not None or (args.load is not None and not args.finetune)):
        raise MkdConfigError(
            "--ckpt-format torch is not supported: leave it out (checkpoints in that format are converted with "
            "Megatron-LM first)"
        )
    keeps_state = {"--kd-balance": kd.balance, f"--kd-rollout-steps {kd.rollout_steps}": kd.rollout_steps > 1}
    for flag, is_given in keeps_state.items():
        if is_given and args.ckpt_format != "torch_dist" and args.save is not None:
            raise MkdConfigError(
                f"{flag} needs --ckpt-format torch_dist, not {args.ckpt_format}: a resumed job reads its state "
                "from the checkpoint"
            )


def check_saving(args: Namespace, kd: KDConfig) -> None:
    """Refuse checkpoint flags that contradict each other, and an asynchronous save that would be synchronous."""
    interval = kd.save_hf_interval
    _check_format(args, kd)
    if kd.keep_last is not None:
        if args.save is None:
            raise MkdConfigError(f"--kd-keep-last is {kd.keep_last}, but there is no folder to save in: give --save")
        if args.ckpt_format != "torch_dist":
            raise MkdConfigError(f"--kd-keep-last needs --ckpt-format torch_dist, not {args.ckpt_format}")
    if kd.keep_best is not None:
        _check_keep_best(args, kd.keep_best)
    if interval is not None:
        if args.save is None:
            raise MkdConfigError(f"--kd-save-hf-interval is {interval}, but there is no folder to save in: give --save")
        if args.ckpt_format != "torch_dist":
            raise MkdConfigError(f"--kd-save-hf-interval needs --ckpt-format torch_dist, not {args.ckpt_format}")
        if args.save_interval and interval % args.save_interval:
            raise MkdConfigError(
                f"--kd-save-hf-interval is {interval}, which is not a multiple of --save-interval "
                f"{args.save_interval}: a Hugging Face folder is made from a checkpoint"
            )
    if not args.async_save or cpu.is_target():
        return
    if not args.use_persistent_ckpt_worker:
        raise MkdConfigError("--async-save works only with --use-persistent-ckpt-worker: give both, or neither")
    if args.async_strategy == "nvrx" and find_spec("nvidia_resiliency_ext") is None:
        raise MkdConfigError(
            "--async-save needs the package nvidia-resiliency-ext: install it, or give --async-strategy mcore"
        )


def check_optimizer(args: Namespace) -> None:
    """Refuse an optimizer of a package that is not installed; megatron finds out when it builds the optimizer."""
    if args.optimizer not in ("adam", "sgd") and find_spec("emerging_optimizers") is None:
        raise MkdPackageError(
            f"--optimizer {args.optimizer} needs the package emerging-optimizers, which is not installed in this "
            "Python: pip install emerging-optimizers, or give adam or sgd"
        )
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise MkdConfigError("--optimizer sgd does not work with --use-distributed-optimizer: leave one of them out")
    for name in _PRECISIONS:
        if (dtype := getattr(args, name)) != "fp32" and not args.use_precision_aware_optimizer:
            raise MkdConfigError(
                f"--{name.replace('_', '-')} {dtype} needs --use-precision-aware-optimizer: give both, or neither"
            )
    if args.use_precision_aware_optimizer and not args.use_distributed_optimizer:
        raise MkdConfigError("--use-precision-aware-optimizer needs --use-distributed-optimizer: give both, or neither")


_PRECISIONS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def check_parts(args: Namespace) -> None:
    """Refuse flags of parts that are not there; megatron finds out when the models are built, or later."""
    faults = (getattr(args, f"fault_injector_{name}", None) for name in ("ranks", "num_ranks"))
    if any(value is not None for value in faults) and find_spec("nvidia_resiliency_ext") is None:
        raise MkdPackageError(
            "--fault-injector-ranks and --fault-injector-num-ranks need the package nvidia-resiliency-ext, which is "
            "not installed in this Python: install it, or leave them out"
        )
    if args.attention_backend == AttnBackend.local:
        raise MkdConfigError(
            "--attention-backend local is not supported (megatron-core 0.19 itself fails with it): give "
            "--transformer-impl local, or another backend"
        )
    if getattr(args, "reuse_grad_buf_for_mxfp8_param_ag", False) and not args.fp8_param_gather:
        raise MkdConfigError(
            "--reuse-grad-buf-for-mxfp8-param-ag works only with --fp8-param-gather: give both, or neither"
        )
    for name in ("experimental_attention_variant", "use_te_activation_func"):
        value = getattr(args, name, None)  # mkd has local layers with a gated delta net
        if value and value != "gated_delta_net" and (cpu.is_target() or args.transformer_impl == "local"):
            raise MkdConfigError(f"--{name.replace('_', '-')} needs Transformer Engine, on GPUs: leave it out")


def check_trackers(args: Namespace, kd: KDConfig) -> None:
    """Raise MkdConfigError for a tracker that is not installed or lacks a flag."""
    wanted = {
        "--tensorboard-dir": (args.tensorboard_dir, "tensorboard"),
        "--wandb-project": (args.wandb_project, "wandb"),
        "--kd-mlflow-experiment": (kd.mlflow_experiment, "mlflow"),
    }
    for flag, (value, package) in wanted.items():
        if value and find_spec(package) is None:
            raise MkdConfigError(
                f"{flag} is {value}, but the package {package} is not installed: pip install {package}, or leave it out"
            )
    if args.wandb_project and not args.wandb_exp_name:
        raise MkdConfigError(f"--wandb-project is {args.wandb_project}: give --wandb-exp-name as well")
    if args.wandb_project and not args.wandb_save_dir and args.save is None:
        raise MkdConfigError(f"--wandb-project is {args.wandb_project}: give --wandb-save-dir, or --save")


def check_sizes(args: Namespace) -> None:
    """Refuse parallel sizes below 1."""
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        size = getattr(args, f"{name}_parallel_size")
        if size < 1:
            raise MkdConfigError(f"--{name.replace('_', '-')}-parallel-size is {size}; it must be at least 1")


def check_ranks(args: Namespace, prefix: str = "--") -> None:
    """Refuse parallel sizes that do not divide the ranks of the job.

    Args:
        args: Megatron's, in the layout that is checked.
        prefix: beginning of the flags of its parallel sizes: `--`, or `--kd-teacher-` for the teacher's own layout.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size
    if args.world_size % (tp * pp * cp):
        raise MkdConfigError(
            f"{prefix}tensor-model-parallel-size {tp} * {prefix}pipeline-model-parallel-size {pp} * "
            f"{prefix}context-parallel-size {cp} = {tp * pp * cp} does not divide the {args.world_size} ranks of this "
            "job"
        )
    expert_tp = args.expert_tensor_parallel_size or tp
    has_expert_groups = args.num_experts is not None or args.expert_tensor_parallel_size  # megatron makes both
    if has_expert_groups and args.world_size % (expert_tp * ep * pp):
        raise MkdConfigError(
            f"{prefix}expert-model-parallel-size {ep} * expert tensor size {expert_tp} "
            "(--expert-tensor-parallel-size) * "
            f"{prefix}pipeline-model-parallel-size {pp} does not divide the {args.world_size} ranks of this job"
        )


def check_student(args: Namespace) -> None:
    """Refuse parallel sizes that do not divide the student."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    check_divisions("the student", vars(args), tp, pp)
    check_first_and_last_stage(args)
    check_attention_heads("the student", vars(args), args)


def check_experts(args: Namespace) -> None:
    """Refuse flags of a student with experts that megatron refuses only inside the first training step."""
    if args.num_experts is None:
        return
    tp = args.tensor_model_parallel_size
    if tp > 1 and not args.sequence_parallel:
        raise MkdConfigError(
            f"--tensor-model-parallel-size {tp} needs --sequence-parallel for a student with {args.num_experts} "
            "experts: megatron does not train them without it"
        )
    if args.moe_apply_probs_on_input and args.moe_router_topk != 1:
        raise MkdConfigError(
            f"--moe-apply-probs-on-input needs one expert per token, the student has {args.moe_router_topk} "
            "(--moe-router-topk)"
        )
    if args.moe_router_fusion and find_spec("transformer_engine") is None:
        raise MkdPackageError(
            "--moe-router-fusion needs Transformer Engine, which is not installed in this Python: leave it out"
        )
    if args.moe_latent_size and args.moe_shared_expert_overlap:
        raise MkdConfigError("--moe-shared-expert-overlap does not work with --moe-latent-size: leave it out")
    _check_balancing(args)


def _check_balancing(args: Namespace) -> None:
    """Refuse a type of load balancing that contradicts other flags of the router."""
    kinds, coefficients = (
        value if isinstance(value, list) else [value]
        for value in (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff)
    )
    if kinds == ["sinkhorn"] and any(coefficients):
        raise MkdConfigError(
            f"--moe-router-load-balancing-type sinkhorn has no load-balancing loss, but its coefficient is "
            f"{coefficients[0]:g}: give --moe-aux-loss-coeff 0"
        )
    if kinds != ["quantile_balancing"]:
        return
    what = "--moe-router-load-balancing-type quantile_balancing"
    for flag in ("--moe-router-fusion", "--moe-router-num-groups", "--moe-router-group-topk"):
        if getattr(args, flag.removeprefix("--").replace("-", "_")):
            raise MkdConfigError(f"{what} does not work with {flag}: leave one of them out")
    assignments = args.micro_batch_size * args.seq_length * args.moe_router_topk
    if assignments % args.num_experts:
        raise MkdConfigError(
            f"{what} needs equal shares: --micro-batch-size {args.micro_batch_size} * --seq-length {args.seq_length} * "
            f"{args.moe_router_topk} experts per token is not divisible by the {args.num_experts} experts"
        )


def check_virtual_stages(args: Namespace) -> None:
    """Refuse steps and evaluations whose microbatches do not fill the interleaved pipeline schedule.

    Args:
        args: Megatron's, after its own checks.
    """
    if args.virtual_pipeline_model_parallel_size is None:
        return
    pp = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or pp
    first = args.global_batch_size if args.rampup_batch_size is None else int(args.rampup_batch_size[0])
    batches = {"--global-batch-size": (first, args.micro_batch_size)}
    if args.rampup_batch_size is not None:
        batches = {"--rampup-batch-size": batches["--global-batch-size"]}
    if args.eval_iters:
        batches["--eval-global-batch-size"] = (args.eval_global_batch_size, args.eval_micro_batch_size)
    for flag, (batch, micro) in batches.items():
        count = batch // (micro * args.data_parallel_size)
        if not pp <= group <= count or 0 < count % group < pp:
            raise MkdConfigError(
                f"{flag} {batch} gives {count} microbatches of {micro} to each of {args.data_parallel_size} "
                f"data-parallel ranks: virtual pipeline stages compute {group} at a time "
                "(--microbatch-group-size-per-virtual-pipeline-stage, by default the pipeline-parallel size); the "
                f"number must be a multiple of it, or leave a remainder of at least {pp}"
            )


def length_multiple(args: Namespace) -> int:
    """Divisor of every row length, in tokens, under one layout: each context-parallel rank holds two equal parts of a
    row, which sequence parallelism splits over the tensor-parallel ranks."""
    cp = args.context_parallel_size
    slices = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return cp * math.lcm(2, slices) if cp > 1 else slices


def check_sequence(args: Namespace, prefix: str = "--") -> None:
    """Refuse rows that the layout cannot split evenly; `prefix` as in `check_ranks`."""
    if args.seq_length % length_multiple(args) == 0:
        return
    reasons = []
    if args.context_parallel_size > 1:
        reasons.append(f"2 * {prefix}context-parallel-size {args.context_parallel_size}")
    if args.sequence_parallel:
        reasons.append(f"{prefix}tensor-model-parallel-size {args.tensor_model_parallel_size} with --sequence-parallel")
    raise MkdConfigError(
        f"--seq-length {args.seq_length} is not a multiple of {length_multiple(args)}, which "
        f"{' and '.join(reasons)} need{'s' if len(reasons) == 1 else ''}"
    )


_CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def check_context_parallel(args: Namespace) -> None:
    """Refuse context-parallel communication types that do not exist or that the attention kernels lack."""
    if args.hybrid_context_parallel:
        raise MkdConfigError("--hybrid-context-parallel is not supported: give --context-parallel-size alone")
    if args.context_parallel_size == 1:
        return
    kinds = args.cp_comm_type
    for kind in kinds:
        if kind not in _CP_COMM_TYPES:
            raise MkdConfigError(f"--cp-comm-type is {kind!r}; legal values are {', '.join(_CP_COMM_TYPES)}")
    if len(kinds) > 1:
        raise MkdConfigError(
            f"--cp-comm-type {' '.join(kinds)} is a list over layers: give one, which student and teacher share"
        )


def check_attention_kernels(args: Namespace, kd: KDConfig, prefix: str = "--") -> None:
    """Refuse packed rows and context parallelism on GPUs without Transformer Engine and half precision, which alone
    have the kernels; `prefix` as in `check_ranks`."""
    if args.context_parallel_size > 1:
        what = f"{prefix}context-parallel-size {args.context_parallel_size}"
    elif kd.packing != "none":
        what = f"--kd-packing {kd.packing}"
    else:
        return
    if cpu.is_target():
        return
    if args.transformer_impl != "transformer_engine":
        raise MkdConfigError(f"{what} needs --transformer-impl transformer_engine on GPUs, not {args.transformer_impl}")
    if not (args.bf16 or args.fp16):
        raise MkdConfigError(f"{what} needs --bf16 or --fp16: Transformer Engine has no such attention in fp32")
    if kd.teacher_dtype == "fp32":
        raise MkdConfigError(
            f"{what} does not work with --kd-teacher-dtype fp32: Transformer Engine has no such attention in fp32"
        )
    kind = args.cp_comm_type[0]
    if args.context_parallel_size > 1 and kd.packing != "none" and kind not in ("p2p", "a2a"):
        raise MkdConfigError(
            f"--cp-comm-type {kind} does not work with --kd-packing {kd.packing}: Transformer Engine exchanges packed "
            "rows by p2p or a2a"
        )


def check_student_fp8(args: Namespace) -> None:
    """Refuse --fp8-format on GPUs without FP8 matrix products, which Transformer Engine refuses in the first step."""
    capability = cpu.compute_capability()
    if args.fp8 and capability is not None and capability < MIN_FP8_CAPABILITY:
        raise MkdConfigError(
            f"--fp8-format is {args.fp8}, but this GPU has compute capability {capability}, below "
            f"{MIN_FP8_CAPABILITY}: leave it out"
        )


def check_transformer_engine(args: Namespace) -> None:
    """Refuse Transformer Engine, megatron's default on GPUs, where it is not installed."""
    if cpu.is_target() or args.transformer_impl == "local" or find_spec("transformer_engine") is not None:
        return
    cp = args.context_parallel_size
    needed = f"--context-parallel-size {cp}" if cp > 1 else None
    if getattr(args, "kd_packing", "none") != "none":
        needed = f"--kd-packing {args.kd_packing}"
    raise MkdPackageError(
        f"--transformer-impl is {args.transformer_impl}, but Transformer Engine is not installed in this Python: "
        "install it (pip install 'transformer-engine[pytorch]')"
        + (f"; {needed} does not work without it" if needed else ", or give --transformer-impl local, which is slower")
    )


def check_attention_heads(model: str, sizes: Mapping[str, Any], args: Namespace, prefix: str = "--") -> None:
    """Refuse all-to-all context parallelism over ranks that do not divide a model's heads: it distributes heads. Refuse
    what a gated delta net or a Mamba layer cannot compute.

    Args:
        model: name of the model in the message, such as "the student".
        sizes: its architecture, by Megatron argument name.
        args: Megatron's, in the layout of the model.
        prefix: see `check_ranks`.
    """
    if sizes.get("experimental_attention_variant") == "gated_delta_net":
        _check_delta_net(model, sizes, args, prefix)
    if "M" in (sizes.get("layer_mixers") or ()):
        _check_mamba(model, sizes, args, prefix)
    ranks = {"a2a": args.context_parallel_size, "a2a+p2p": (args.hierarchical_context_parallel_sizes or [1])[0]}
    kind = args.cp_comm_type[0]
    if args.context_parallel_size == 1 or kind not in ranks:
        return
    tp = args.tensor_model_parallel_size
    groups = sizes["num_query_groups"] if sizes.get("group_query_attention") else sizes["num_attention_heads"]
    for what, count in (("attention heads", sizes["num_attention_heads"]), ("key-value heads", groups)):
        if count and count % (tp * ranks[kind]):
            raise MkdConfigError(
                f"--cp-comm-type {kind} distributes heads: {model} has {count} {what}, which "
                f"{prefix}tensor-model-parallel-size {tp} * {ranks[kind]} context-parallel ranks do not divide; give "
                "p2p or all_gather, which split the sequence"
            )


def _check_delta_net(model: str, sizes: Mapping[str, Any], args: Namespace, prefix: str) -> None:
    """Arguments as in `check_attention_heads`."""
    tp, cp, heads = args.tensor_model_parallel_size, args.context_parallel_size, sizes["linear_num_key_heads"]
    if heads % (tp * cp):
        raise MkdConfigError(
            f"{prefix}tensor-model-parallel-size {tp} * {prefix}context-parallel-size {cp} does not divide the {heads} "
            f"key heads (linear_num_key_heads) of the gated delta net of {model}, which both distribute"
        )
    packing = getattr(args, "kd_packing", "none")
    if args.deterministic_mode and packing != "none":
        raise MkdConfigError(
            f"--deterministic-mode does not work with --kd-packing {packing}: {model} has a gated delta net, of which "
            "megatron has no deterministic kernels for packed rows; leave one of the two out"
        )


def _check_mamba(model: str, sizes: Mapping[str, Any], args: Namespace, prefix: str) -> None:
    """Arguments as in `check_attention_heads`."""
    tp, cp, groups = args.tensor_model_parallel_size, args.context_parallel_size, sizes["mamba_num_groups"]
    if groups % (tp * cp):
        raise MkdConfigError(
            f"{prefix}tensor-model-parallel-size {tp} * {prefix}context-parallel-size {cp} does not divide the "
            f"{groups} groups (mamba_num_groups) of the Mamba layers of {model}, which both distribute"
        )


def check_variable_lengths(args: Namespace) -> None:
    """Refuse flags that need microbatches of one length together with --kd-variable-seq-lengths."""
    reasons = {
        "--tp-comm-overlap": (args.tp_comm_overlap, "its buffers have one shape"),
        "--moe-token-dispatcher-type allgather": (
            args.num_experts is not None and args.moe_token_dispatcher_type == "allgather",
            "use alltoall",
        ),
    }
    for flag, (given, reason) in reasons.items():
        if given:
            raise MkdConfigError(f"--kd-variable-seq-lengths does not work with {flag} ({reason})")


def check_batch(args: Namespace) -> None:
    """Refuse a global batch that the ranks do not divide."""
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = args.world_size // model_size
    batch, micro = args.global_batch_size, args.micro_batch_size
    if micro < 1:
        raise MkdConfigError(f"--micro-batch-size is {micro}; it must be at least 1")
    is_fixed = batch is not None and args.rampup_batch_size is None
    if is_fixed and replicas > 0 and batch % (micro * replicas):
        raise MkdConfigError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} * {replicas} data-parallel "
            "ranks"
        )
    if args.step_batch_size_schedule is not None:
        _step_batch_sizes(args.step_batch_size_schedule, args.seq_length)
        if args.train_iters is not None:
            raise MkdConfigError(
                f"--step-batch-size-schedule {args.step_batch_size_schedule} does not work with --train-iters "
                f"{args.train_iters}: Megatron counts warmup and decay of the learning rate in samples, and multiplies "
                "iterations by one batch size; give --train-samples and the other lengths in samples"
            )


def check_batches_grow(args: Namespace, rows: int) -> None:
    """Refuse a schedule of batches that become smaller after the rows that a run has read: Megatron would end there.

    Args:
        args: Megatron's.
        rows: that the run has read before this job.
    """
    schedule = args.step_batch_size_schedule
    if schedule is None:
        return
    for (_, before), (samples, batch) in pairwise(_step_batch_sizes(schedule, args.seq_length)):
        if batch < before and rows < samples:
            raise MkdConfigError(
                f"--step-batch-size-schedule {schedule}: the batch falls from {before} to {batch} after {samples} "
                f"samples, which Megatron supports at a resume only, and this job begins after {rows}: let batches "
                "grow, or stop the run there and resume it"
            )


def _step_batch_sizes(schedule: str, seq_length: int) -> list[tuple[int, int]]:
    """The samples after which a batch size begins, and this size. Refuses a schedule that Megatron cannot read."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        return StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, seq_length).schedule
    except (AssertionError, ValueError, OverflowError) as error:
        raise MkdConfigError(
            f"--step-batch-size-schedule {schedule} ({error}): write TOKENS:BATCH for each batch size, from 0 tokens "
            f'on, such as "0:64 {1000 * seq_length}:128"; --seq-length is {seq_length}'
        ) from None


def check_positions(args: Namespace, kd: KDConfig) -> None:
    """Refuse samples longer than the student's positions. Packed rows may be longer, since positions restart in each
    sample and samples are cut to the models' positions."""
    positions = args.max_position_embeddings
    if positions is None or args.seq_length <= positions:
        return
    where = "--max-position-embeddings, or max_position_embeddings in the config.json of --kd-student-hf"
    has_table = args.position_embedding_type == "learned_absolute"  # without entries for the padding of longer rows
    if kd.packing == "none" or has_table:
        hint = "" if has_table else "; rows of several shorter samples may be: --kd-packing best_fit"
        raise MkdConfigError(
            f"--seq-length {args.seq_length} is longer than the student's {positions} positions ({where}){hint}"
        )
    if positions < kd.packing_multiple:
        raise MkdConfigError(
            f"--kd-packing-multiple {kd.packing_multiple} is longer than the student's {positions} positions ({where})"
        )


def check_rows(args: Namespace, kd: KDConfig, has_chats: bool) -> None:
    """Refuse flags that contradict rows of whole samples, which packing and chat files produce.

    Args:
        args: Megatron's.
        kd: packing options.
        has_chats: True if the data include a chat file.
    """
    is_packed = kd.packing != "none"
    if not (is_packed or has_chats):
        return
    what = f"--kd-packing {kd.packing}" if is_packed else "a chat file in --data-path"
    for flag, given in {
        "--mock-data": args.mock_data,
        "--reset-position-ids": args.reset_position_ids,
        "--reset-attention-mask": args.reset_attention_mask,
        "--eod-mask-loss": args.eod_mask_loss,
    }.items():
        if given:
            raise MkdConfigError(f"{flag} does not work with {what}, which makes rows of whole samples: leave it out")
    if has_chats and args.tokenizer_type != "HuggingFaceTokenizer":
        raise MkdConfigError(
            f"--tokenizer-type is {args.tokenizer_type}, but chat files need the chat template of a "
            "HuggingFaceTokenizer"
        )
    check_packing(args, kd)


def check_packing(args: Namespace, kd: KDConfig, prefix: str = "--") -> None:
    """Refuse a --kd-packing-multiple that does not divide --seq-length, or that context parallelism cannot split;
    `prefix` as in `check_ranks`."""
    multiple, parts = kd.packing_multiple, 2 * args.context_parallel_size
    if kd.packing == "none":
        return
    if args.context_parallel_size > 1 and multiple % parts:
        raise MkdConfigError(
            f"--kd-packing-multiple {multiple} is not divisible by 2 * {prefix}context-parallel-size "
            f"{args.context_parallel_size}: every sample is split into {parts} equal parts"
        )
    if args.seq_length % multiple:
        raise MkdConfigError(
            f"--seq-length {args.seq_length} is not divisible by --kd-packing-multiple {multiple}: samples are "
            "padded to it and fill rows of that length"
        )


def check_top_k(kd: KDConfig, true_vocab: int) -> None:
    """Refuse a --kd-top-k larger than the vocabulary."""
    if kd.top_k is not None and kd.top_k > true_vocab:
        raise MkdConfigError(f"--kd-top-k is {kd.top_k}, but the vocabulary has {true_vocab} tokens: leave it out")


def check_divisions(model: str, sizes: Mapping[str, Any], tp: int, pp: int, prefix: str = "--") -> None:
    """Refuse tensor- and pipeline-parallel sizes that do not divide a model's heads, widths or layers.

    Args:
        model: name of the model in the message, such as "the student".
        sizes: its architecture, by Megatron argument name.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        prefix: see `check_ranks`.
    """
    groups = sizes["num_query_groups"] if sizes.get("group_query_attention") else None
    divided = {
        "attention heads": sizes["num_attention_heads"],
        "key-value heads (query groups)": groups,
        "hidden width": sizes["hidden_size"],
        "feed-forward width": sizes.get("ffn_hidden_size"),
    }
    for what, size in divided.items():
        if size and size % tp:
            raise MkdConfigError(
                f"{prefix}tensor-model-parallel-size {tp} does not divide the {size} {what} of {model}"
            )
    layers = sizes["num_layers"]
    if layers and layers % pp and has_even_stages(sizes):
        raise MkdConfigError(
            f"{prefix}pipeline-model-parallel-size {pp} does not divide the {layers} layers of {model}"
        )


def has_even_stages(sizes: Mapping[str, Any]) -> bool:
    """True if no flag divides the layers unevenly among pipeline stages; `sizes` by Megatron argument name."""
    return all(sizes.get(name) in (None, False) for name in names_with(ArgRole.STAGES))


def check_first_and_last_stage(args: Namespace) -> None:
    """Refuse numbers of layers of the student's first and last pipeline stage that leave the others an uneven number,
    or none."""
    given = {
        flag: layers
        for flag, layers in (
            ("--decoder-first-pipeline-num-layers", args.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", args.decoder_last_pipeline_num_layers),
        )
        if layers is not None
    }
    if not given or not args.num_layers:
        return
    size, total = args.pipeline_model_parallel_size, args.num_layers
    stages, layers = size - len(given), total - sum(given.values())
    fits = layers >= stages and layers % stages == 0 if stages > 0 else stages == layers == 0
    if min(given.values()) < 1 or not fits:
        flags = " and ".join(f"{flag} {value}" for flag, value in given.items())
        raise MkdConfigError(
            f"{flags}: {layers} of the student's {total} layers are left for the {max(stages, 0)} other stages of "
            f"--pipeline-model-parallel-size {size}; every stage needs at least one layer, and the others equally many"
        )


def check_layer_pairs(pairs: Sequence[LayerPair], args: Namespace, teacher_layers: int) -> None:
    """Refuse pairs with layers that a model does not have, and flags under which a layer's output is inaccessible.

    Args:
        pairs: pairs of --kd-hidden-loss; may be empty.
        args: Megatron's arguments of the student, after their own checks.
        teacher_layers: number of layers of the teacher.
    """
    for pair in pairs:
        for model, number, count in (
            ("student", pair.student, args.num_layers),
            ("teacher", pair.teacher, teacher_layers),
        ):
            if not 1 <= number <= count:
                raise MkdConfigError(
                    f"--kd-hidden-loss has the pair {pair}, but the {model} has no layer {number}: its layers are 1 to "
                    f"{count}"
                )
    reasons = {
        "--overlap-moe-expert-parallel-comm": (args.overlap_moe_expert_parallel_comm, "it runs no whole layers"),
        "--use-megatron-fsdp": (args.use_megatron_fsdp, "it does not shard the maps between layers"),
        "--use-torch-fsdp2": (args.use_torch_fsdp2, "it does not shard the maps between layers"),
    }
    for flag, (given, reason) in reasons.items():
        if pairs and given:
            raise MkdConfigError(f"--kd-hidden-loss does not work with {flag} ({reason}): leave one of them out")


GRAPH_IMPLEMENTATION = "transformer_engine"
"""The value of --cuda-graph-impl that captures each layer of the student, forward and backward."""
_OTHER_GRAPHS = {
    "full_iteration": "each step would repeat the numbers that the host has computed for the captured one",
    "local": "it has not been tested",
}
"""Its other values -> the reason that they do not work."""


def reason_against_capture(args: Namespace) -> str | None:
    """The reason that a model's layers are not captured; None if they can be.

    Args:
        args: Megatron's arguments of the model.
    """
    for is_so, reason in (
        (args.num_experts is not None, "the host reads the number of tokens of each of its experts"),
        (
            args.experimental_attention_variant is not None,
            f"graphs with {args.experimental_attention_variant} are untested",
        ),
        (args.multi_latent_attention, "graphs with latent attention are untested"),
        ("M" in (getattr(args, "layer_mixers", None) or ()), "graphs with Mamba layers are untested"),
    ):
        if is_so:
            return reason
    return None


def check_student_graphs(args: Namespace, kd: KDConfig) -> None:
    """Refuse --cuda-graph-impl for a student or a job whose microbatches a graph cannot repeat.

    Args:
        args: Megatron's arguments of the student.
        kd: the flags.

    Raises:
        MkdConfigError: names the other flag or the reason, and what to change.
    """
    if args.cuda_graph_impl == "none":
        return
    given = f"--cuda-graph-impl {args.cuda_graph_impl}"
    if args.cuda_graph_impl != GRAPH_IMPLEMENTATION:
        raise MkdConfigError(
            f"{given} does not work with mkd: {_OTHER_GRAPHS[args.cuda_graph_impl]}; give {GRAPH_IMPLEMENTATION}, or "
            "leave it out"
        )
    if args.transformer_impl != "transformer_engine":
        raise MkdConfigError(f"{given} needs --transformer-impl transformer_engine, it is {args.transformer_impl}")
    # Megatron can capture a part of a layer with experts (--cuda-graph-modules).
    reason = reason_against_capture(args) if args.num_experts is None else "graphs with experts are untested"
    if reason is not None:
        raise MkdConfigError(f"{given} does not work with this student: {reason}; leave it out")
    for other, reason in _without_graphs(args, kd):
        raise MkdConfigError(f"{given} does not work with {other}: {reason}; leave one of them out")


def _without_graphs(args: Namespace, kd: KDConfig) -> Iterator[tuple[str, str]]:
    """Flags that are given and do not work with graphs of the student, each with the reason."""
    stages, schedule = args.pipeline_model_parallel_size, args.step_batch_size_schedule
    for flag, given, reason in (
        (f"--kd-packing {kd.packing}", kd.packing != "none", "segments of rows differ from microbatch to microbatch"),
        ("--kd-variable-seq-lengths", kd.variable_seq_lengths, "a graph has one shape"),
        (f"--kd-hidden-loss {kd.hidden_loss}", kd.hidden_loss is not None, "a layer in a graph runs no hooks"),
        (f"--kd-lora {kd.lora}", kd.lora is not None, "it has not been tested"),
        ("--kd-on-policy", kd.is_on_policy, "texts that the student writes have other shapes"),
        ("--kd-sample-prompts", kd.sample_prompts is not None, "texts that the student writes have other shapes"),
        ("--kd-eval-tasks", kd.eval_tasks is not None, "texts that the student writes have other shapes"),
        (
            f"--recompute-granularity {args.recompute_granularity}",
            args.recompute_granularity == "full",
            "a graph holds the activations of its layer",
        ),
        (
            f"--step-batch-size-schedule {schedule}",
            stages > 1 and schedule is not None,
            f"{stages} pipeline stages capture the microbatches of one batch size",
        ),
    ):
        if given:
            yield flag, reason
