"""CUDA graphs: models whose layers cannot be captured, and jobs whose microbatches a graph cannot repeat."""

from argparse import Namespace
from collections.abc import Iterator

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError

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
