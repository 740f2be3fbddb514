"""Cross-entropy of a teacher whose LM head is cut in the column order of a `CrossVocabulary`."""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses.inputs import MIN_CHUNK_TOKENS, LMHead, LogitMap, loss_chunks, statistics_dtype
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


@torch.no_grad()
def teacher_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    vocabulary: CrossVocabulary,
    tp_group: ProcessGroup,
    sequence_parallel: bool,
    chunk_rows: int | None,
    logit_map: LogitMap,
) -> Tensor:
    """[N] fp32 -ln p(label) in nats, 0 where the mask is. Not differentiable.

    Args:
        hidden: [N, Ht], or [N/tp, Ht] with `sequence_parallel`.
        head: [columns, Ht] rows of the ids `vocabulary.teacher_columns`.
        labels: [N] int64 teacher ids; anything where the mask is 0.
        mask: [N]
        vocabulary: of this rank of `tp_group`.
        tp_group, sequence_parallel, chunk_rows: as in `xtoken_loss`. Communication for each chunk of rows: one
            all-gather of 12 bytes a row.
        logit_map: scale and softcap of the teacher's logits.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=tp_group)
    columns, dtype = len(vocabulary.teacher_columns), statistics_dtype(hidden)
    shard = VocabShard(
        tp_group, tp_group.rank(), tp_group.size(), vocabulary.teacher_start, columns, vocabulary.teacher_vocab
    )
    lm_head, result = LMHead.of(head, None), torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
    place = vocabulary.teacher_place[torch.where(mask != 0, labels, 0)] - shard.start
    for rows in loss_chunks(len(labels), columns, dtype, chunk_rows, MIN_CHUNK_TOKENS):
        part = hidden[rows]
        logits = logit_map.apply_(lm_head.logits(part, part.new_empty((len(part), columns), dtype=dtype)))
        own = (place[rows] >= 0) & (place[rows] < columns)
        found = logits.gather(1, torch.where(own, place[rows], 0)[:, None])[:, 0]
        at_label = torch.where(own, found, 0)
        top = logits.amax(dim=1)
        mass = (logits - top[:, None]).exp().sum(dim=1)
        merged = shard.exchange({"top": top, "mass": mass, "label": at_label}).wait()
        most = merged["top"].amax(dim=0)
        log_sum = most + (merged["mass"] * (merged["top"] - most).exp()).sum(dim=0).log()
        result[rows] = torch.where(mask[rows] != 0, log_sum - merged["label"].sum(dim=0), 0).float()
    return result
