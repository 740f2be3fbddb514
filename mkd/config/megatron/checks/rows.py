"""Rows: their length, the samples in them, and the parts into which a layout splits them."""

from argparse import Namespace

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import length_multiple
from mkd.errors import MkdConfigError


def check_sequence(args: Namespace, prefix: str = "--") -> None:
    """Refuse rows that the layout cannot split evenly; `prefix` as in `parallel_sizes.check_ranks`."""
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


def check_position_resets(args: Namespace, embedding: str | None, model: str) -> None:
    """Refuse --reset-position-ids for a model that does not read position ids.

    megatron-core 0.19's rotary embeddings count the tokens of a row; only a table of learned positions is read at the
    ids, so the flag would change nothing.

    Args:
        args: Megatron's.
        embedding: `position_embedding_type` of the model.
        model: its name in the message, such as "the student".
    """
    if args.reset_position_ids and embedding != "learned_absolute":
        raise MkdConfigError(
            f"--reset-position-ids has no effect on {model}: positions of type {embedding} (--position-embedding-type) "
            "count the tokens of a row, and only learned_absolute reads position ids; leave it out, or give "
            "--kd-packing best_fit, where positions and attention begin anew at each document"
        )


def check_rows(args: Namespace, kd: KDConfig, has_chats: bool) -> None:
    """Refuse flags that contradict rows of whole samples, which packing and chat files produce, and
    --reset-position-ids where it has no effect.

    Args:
        args: Megatron's.
        kd: packing options.
        has_chats: True if the data include a chat file.
    """
    is_packed = kd.packing != "none"
    if not (is_packed or has_chats):
        check_position_resets(args, args.position_embedding_type, "the student")
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
    `prefix` as in `parallel_sizes.check_ranks`."""
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
