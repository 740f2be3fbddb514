"""Cross-entropy of a teacher whose LM head is in the column order of a `CrossVocabulary`."""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses.inputs import MIN_CHUNK_TOKENS, LinearLogits, LMHead, loss_chunks, statistics_dtype
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


@torch.no_grad()
def teacher_cross_entropy(
    teacher: LinearLogits,
    labels: Tensor,
    mask: Tensor,
    *,
    vocabulary: CrossVocabulary,
    tp_group: ProcessGroup,
    sequence_parallel: bool,
    chunk_rows: int | None,
) -> Tensor:
    """[N] fp32 -ln p(label) in nats, 0 where the mask is 0. Not differentiable.

    Communication per loss chunk: one all-gather of 12 bytes per token over `tp_group`.

    Args:
        teacher: the LM head has the rows of the ids `vocabulary.teacher_columns`.
        labels: [N] int64 teacher ids; anything where the mask is 0.
        mask: [N]
        vocabulary: of this rank of `tp_group`.
        tp_group: ranks that hold the other columns.
        sequence_parallel: hidden states are [N/tp, Ht].
        chunk_rows: tokens per loss chunk; see `LossOptions`.
    """
    hidden = teacher.hidden
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=tp_group)
    columns, dtype = len(vocabulary.teacher_columns), statistics_dtype(hidden)
    shard = VocabShard(
        tp_group, tp_group.rank(), tp_group.size(), vocabulary.teacher_start, columns, vocabulary.teacher_vocab
    )
    head, result = LMHead.of(teacher.weight, None), torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
    label_column = vocabulary.teacher_position[torch.where(mask != 0, labels, 0)] - shard.start
    for tokens in loss_chunks(len(labels), columns, dtype, chunk_rows, MIN_CHUNK_TOKENS):
        part, column = hidden[tokens], label_column[tokens]
        logits = teacher.logit_map.apply_(head.logits(part, part.new_empty((len(part), columns), dtype=dtype)))
        own = (column >= 0) & (column < columns)
        found = logits.gather(1, torch.where(own, column, 0)[:, None])[:, 0]
        at_label = torch.where(own, found, 0)
        top = logits.amax(dim=1)
        sum_exp = (logits - top[:, None]).exp().sum(dim=1)
        merged = shard.exchange({"top": top, "sum_exp": sum_exp, "label": at_label}).wait()
        highest = merged["top"].amax(dim=0)
        log_sum = highest + (merged["sum_exp"] * (merged["top"] - highest).exp()).sum(dim=0).log()
        result[tokens] = torch.where(mask[tokens] != 0, log_sum - merged["label"].sum(dim=0), 0).float()
    return result
