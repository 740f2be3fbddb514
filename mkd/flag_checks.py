"""Whether Megatron's flags fit each other and the model: what megatron itself says late, unclearly or not at all."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from mkd.config import LayerPair
from mkd.errors import MkdConfigError


def check_required(args: Namespace) -> None:
    """Refuse a command line without a flag that has no sensible default."""
    required = {
        "--num-layers": (args.num_layers, "the student's size; or give --kd-student-hf"),
        "--seq-length": (args.seq_length, "tokens of a sample"),
        "--micro-batch-size": (args.micro_batch_size, "samples that a rank computes at one time"),
        "--train-iters": (args.train_iters or args.train_samples, "iterations to train; or give --train-samples"),
        "--lr": (args.lr, "peak learning rate"),
    }
    for flag, (value, meaning) in required.items():
        if value is None:
            raise MkdConfigError(f"{flag} is missing ({meaning})")
    if args.save is not None and not (args.save_interval or args.save_retain_interval):
        raise MkdConfigError(f"--save {args.save} needs --save-interval (iterations between checkpoints)")


def check_layout(args: Namespace) -> None:
    """Refuse parallel sizes that do not divide the world, the model or the sequence.

    Raises:
        MkdConfigError: naming the flag, its value and what it does not divide.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size
    sizes = {"tensor-model": tp, "pipeline-model": pp, "context": cp, "expert-model": ep}
    for name, size in sizes.items():
        if size < 1:
            raise MkdConfigError(f"--{name}-parallel-size is {size}; it must be at least 1")
    if args.world_size % (tp * pp * cp):
        raise MkdConfigError(
            f"--tensor-model-parallel-size {tp} * --pipeline-model-parallel-size {pp} * --context-parallel-size {cp} = "
            f"{tp * pp * cp} does not divide the {args.world_size} ranks of this job"
        )
    expert_tp = args.expert_tensor_parallel_size or tp
    if args.num_experts is not None and args.world_size % (expert_tp * ep * pp):
        raise MkdConfigError(
            f"--expert-model-parallel-size {ep} * expert tensor size {expert_tp} * --pipeline-model-parallel-size {pp} "
            f"does not divide the {args.world_size} ranks of this job"
        )
    if cp > 1:
        raise MkdConfigError(f"--context-parallel-size {cp}: context parallelism is not supported yet; use 1")
    check_divisions("the student", vars(args), tp, pp)
    if args.sequence_parallel and args.seq_length % tp:
        raise MkdConfigError(
            f"--seq-length {args.seq_length} is not divisible by --tensor-model-parallel-size {tp}, which "
            "--sequence-parallel needs"
        )
    _check_batch(args)


def _check_batch(args: Namespace) -> None:
    """Refuse a global batch that does not divide, and samples longer than the student's positions."""
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = args.world_size // model_size
    batch, micro = args.global_batch_size, args.micro_batch_size
    if batch is not None and args.rampup_batch_size is None and batch % (micro * replicas):
        raise MkdConfigError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} * {replicas} data-parallel "
            "ranks"
        )
    positions = args.max_position_embeddings
    if positions is not None and args.seq_length > positions:
        raise MkdConfigError(
            f"--seq-length {args.seq_length} is longer than the student's {positions} positions "
            "(--max-position-embeddings, or max_position_embeddings in the config.json of --kd-student-hf)"
        )


def check_divisions(model: str, sizes: dict[str, Any], tp: int, pp: int) -> None:
    """Refuse tensor- and pipeline-parallel sizes that do not divide a model's heads, widths or layers.

    Args:
        model: what to call it in the message, such as "the student".
        sizes: its architecture, by Megatron argument name.
        tp: --tensor-model-parallel-size.
        pp: --pipeline-model-parallel-size.
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
            raise MkdConfigError(f"--tensor-model-parallel-size {tp} does not divide the {size} {what} of {model}")
    uneven = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout")
    layers = sizes["num_layers"]
    if layers and layers % pp and all(sizes.get(name) is None for name in uneven):
        raise MkdConfigError(f"--pipeline-model-parallel-size {pp} does not divide the {layers} layers of {model}")


def check_layer_pairs(pairs: Sequence[LayerPair], args: Namespace, teacher_layers: int) -> None:
    """Refuse pairs with layers that a model does not have, and flags under which a layer's output cannot be reached.

    Args:
        pairs: of --kd-hidden-loss; may be none.
        args: Megatron's, of the student, after its own checks.
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
        "--cuda-graph-impl": (args.cuda_graph_impl != "none", "a layer in a CUDA graph runs no hooks"),
        "--overlap-moe-expert-parallel-comm": (args.overlap_moe_expert_parallel_comm, "it runs no whole layers"),
        "--use-megatron-fsdp": (args.use_megatron_fsdp, "it does not know the maps between layers"),
        "--use-torch-fsdp2": (args.use_torch_fsdp2, "it does not know the maps between layers"),
    }
    for flag, (given, reason) in reasons.items():
        if pairs and given:
            raise MkdConfigError(f"--kd-hidden-loss does not work with {flag} ({reason}): leave one of them out")
