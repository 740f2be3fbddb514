"""Flags of the distillation losses, against the sizes of the models."""

from argparse import Namespace
from collections.abc import Sequence

from mkd.config.kd_config import KDConfig
from mkd.config.values import LayerPair
from mkd.errors import MkdConfigError


def check_top_k_in_vocabulary(kd: KDConfig, true_vocab: int) -> None:
    """Refuse a --kd-top-k larger than the vocabulary."""
    if kd.top_k is not None and kd.top_k > true_vocab:
        raise MkdConfigError(f"--kd-top-k is {kd.top_k}, but the vocabulary has {true_vocab} tokens: leave it out")


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
