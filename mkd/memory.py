"""How much memory a run needs besides its activations, from the arguments alone."""

import copy
from argparse import Namespace

import torch
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from mkd.losses.chunking import LEAST_ROWS, row_chunks

_GIB = 2**30


def estimate_memory(
    student: Namespace, teacher: Namespace | None, chunk_rows: int | None, all_at_once: bool, paired_layers: int = 0
) -> dict[str, float]:
    """GiB on the fullest rank, by what it is for. Activations of the student's layers are not in it.

    Args:
        student: Megatron's arguments of the job.
        teacher: those of the teacher; None when it is not run.
        chunk_rows: tokens whose logits exist at one time; None for the default.
        all_at_once: whether the teacher looks at all micro-batches of a step before the student begins.
        paired_layers: pairs of --kd-hidden-loss, counted as if one stage had them all.
    """
    shard = student.padded_vocab_size // student.tensor_model_parallel_size
    tokens = student.seq_length * student.micro_batch_size // student.context_parallel_size
    # The loss keeps two chunks of the student's logits, and of the teacher's two if it exchanges statistics meanwhile.
    dtype = student.params_dtype if student.params_dtype == torch.bfloat16 else torch.float32
    chunks = row_chunks(tokens, shard, dtype, chunk_rows, LEAST_ROWS)
    rows = chunks[0].stop * min(2, len(chunks))
    teacher_rows = rows if student.tensor_model_parallel_size > 1 else chunks[0].stop
    parts = {
        "student weights, gradients, optimizer": parameters_on_fullest_rank(student) * _bytes_a_parameter(student),
        "logits of the loss": dtype.itemsize * shard * (rows + (0 if teacher is None else teacher_rows)),
    }
    if teacher is not None:
        size = teacher.params_dtype.itemsize
        parts["teacher weights"] = size * parameters_on_fullest_rank(teacher)
        microbatches = student.global_batch_size // (student.micro_batch_size * student.data_parallel_size)
        slices = student.tensor_model_parallel_size if student.sequence_parallel else 1
        held = tokens * (microbatches if all_at_once else 1) // slices
        parts["teacher hidden states"] = size * held * teacher.hidden_size * (1 + paired_layers)
        if paired_layers and student.hidden_size != teacher.hidden_size:
            maps = paired_layers * student.hidden_size * teacher.hidden_size
            parts["maps between layers"] = maps * _bytes_a_parameter(student)
    return {name: count / _GIB for name, count in parts.items()}


def _bytes_a_parameter(args: Namespace) -> float:
    """Weight, fp32 gradient, two fp32 moments, and in half precision the fp32 copy; the last two cut over replicas."""
    weight_and_gradient, optimizer = (8, 8) if args.params_dtype == torch.float32 else (6, 12)
    replicas = args.data_parallel_size * args.context_parallel_size
    return weight_and_gradient + optimizer / (replicas if args.use_distributed_optimizer else 1)


def parameters_on_fullest_rank(args: Namespace) -> int:
    """Parameters of a model on the tensor- and pipeline-parallel rank that has most, as megatron counts them."""
    undivided = copy.copy(args)
    undivided.use_distributed_optimizer, undivided.data_parallel_size, undivided.world_size = False, 1, 1
    undivided.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return round(compute_weight_and_optimizer_memory(undivided) / 18)  # the bytes a parameter that megatron assumes
