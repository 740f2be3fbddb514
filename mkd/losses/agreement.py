"""Top-1 agreement: how often student and teacher would say the same next token. It is measured, never minimised."""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses.chunking import row_chunks
from mkd.losses.lm_head import LMHead
from mkd.losses.logits import statistics_dtype
from mkd.losses.vocab_shard import VocabShard


def top1_agreement(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
) -> Tensor:
    """Whether the student's most probable token is the teacher's; of equal logits the lowest id counts.

    Logits exist a chunk of rows at a time, in fp32: rounding them to bf16 would make many equal. Temperature, and a
    scale or softcap of the logits, move no maximum. One all-gather of 16 bytes a row over `tp_group`, and with
    `sequence_parallel` one of each model's hidden states. The definition: `reference.top1_agreement`.

    Args:
        student_hidden, student_weight, teacher_hidden, teacher_weight, true_vocab, tp_group, sequence_parallel,
            chunk_rows: as in `fused_linear_loss`. Not differentiated.

    Returns:
        [N] fp32, 1 where both are the same token and 0 elsewhere; on all ranks of `tp_group`.

    Raises:
        ValueError: true_vocab and the shards do not fit.
    """
    shard = VocabShard.of(student_weight.shape[0], true_vocab, tp_group)
    shard.check_teacher(student_weight.shape[0], teacher_weight.shape[0])
    with torch.no_grad():
        tops = []
        for hidden, weight in ((student_hidden, student_weight), (teacher_hidden, teacher_weight)):
            if sequence_parallel and shard.size > 1:
                hidden = gather_from_sequence_parallel_region(hidden, group=shard.group)
            tops += _shard_top(hidden, weight[: shard.columns], shard.start, chunk_rows)
        names = ("student_max", "student_id", "teacher_max", "teacher_id")
        everywhere = shard.exchange(dict(zip(names, tops, strict=True))).wait()
        student, teacher = (_merge(everywhere[f"{m}_max"], everywhere[f"{m}_id"]) for m in ("student", "teacher"))
        return (student == teacher).float()


def _shard_top(hidden: Tensor, weight: Tensor, start: int, chunk_rows: int | None) -> tuple[Tensor, Tensor]:
    """([rows] largest logit of the shard, [rows] its global id), both as floats: fp32 holds ids up to 2^24 exactly."""
    (rows, _), columns, dtype = hidden.shape, weight.shape[0], statistics_dtype(hidden)
    top, ids = hidden.new_full((rows,), -torch.inf, dtype=dtype), hidden.new_zeros(rows, dtype=dtype)
    if columns == 0:
        return top, ids  # padding only
    head, chunks = LMHead.of(weight, None), row_chunks(rows, columns, dtype, chunk_rows)
    buffer = hidden.new_empty((chunks[0].stop, columns), dtype=dtype)
    for span in chunks:
        logits = head.logits(hidden[span], buffer[: span.stop - span.start])
        places = logits.argmax(dim=1)  # the first of equal ones
        top[span], ids[span] = logits.gather(1, places[:, None]).squeeze(1), (places + start).to(dtype)
    return top, ids


def _merge(top: Tensor, ids: Tensor) -> Tensor:
    """[tp, rows] maxima and their ids -> [rows] id of the maximum over all shards; ids grow with the shard."""
    return ids.gather(0, top.argmax(dim=0, keepdim=True)).squeeze(0)
