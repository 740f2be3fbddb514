"""Reference for --kd-teachers-mode select: one rank, one text per row, whole logits, autograd."""

from typing import Any

import torch
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.losses import LossSpec, reference
from mkd.teacher.interface import EnsembleSignal, HiddenSignal
from mkd.train.objective import LossContext, MicrobatchObjective, Objective, flatten_tokens
from mkd.train.selection import Selection
from mkd.xtoken.loss.reference import partition_kl
from tests.support.dist import kd_pairs
from tests.support.dist.kd_samples import VOCAB, microbatches
from tests.support.dist.kd_step import Layout, Models, build_student, build_teacher, gradients, parallel_state


def select_truth(rank: int, world_size: int, models: Models) -> dict[str, Any]:
    """`loss` and parts of `gradients` of the first step, as in `kd_run`, and the number of texts per selected
    teacher."""
    with parallel_state(Layout()):
        groups = Groups.from_megatron()
        teacher = build_teacher(Layout(), models, groups)
        chunks = build_student(Layout(), models, groups)
        batches = [KDBatch.from_sample(sample, VOCAB) for sample in microbatches(models.data, 1, 1, 0, 1, models.masks)]
        batches = teacher.prepare(batches, Lookahead.empty())
        tokens = sum(int(batch.ce_mask.sum()) for batch in batches)
        counts = [sum(int(batch.kd_mask.sum()) for batch in batches)] * 2
        if models.xtoken:
            counts[1] = sum(batch.teacher_views[0].chunks for batch in batches)
        total, selected = torch.zeros(()), [0, 0]
        for batch in batches:
            logits = flatten(chunks[0](batch.tokens, batch.position_ids, None).transpose(0, 1))[:, :VOCAB]
            [signals] = teacher.signals([batch])
            best = min((0, 1), key=lambda number: rate(batch, signals.signals[number], models))
            if batch.ce_mask.any():
                selected[best] += 1
            used = flatten_tokens(batch.ce_mask) != 0
            ce = reference.cross_entropy(logits, flatten_tokens(batch.labels))[used].sum()
            kd = divergence(batch, logits, signals.signals[best], models)
            total = total + (1.0 - models.ratio) * ce / tokens + models.ratio * kd / counts[best]
        total.backward()
        return {"loss": total.item(), "gradients": gradients(chunks), "selected": selected}


def flatten(values: Tensor) -> Tensor:
    """[s, b, X] -> [s * b, X]"""
    return values.flatten(0, 1)


def teacher_logits(signal: HiddenSignal, models: Models) -> Tensor:
    """[s * b, true vocabulary] in the order of the ids."""
    logits = flatten(signal.hidden) @ signal.head.t()
    if signal.view is None:
        return logits[:, :VOCAB]
    ids = kd_pairs.vocabulary(models.xtoken, 96, 0, 1).teacher_columns
    return torch.empty_like(logits).index_copy_(1, ids, logits)[:, : kd_pairs.TEACHER_VOCAB]


def rate(batch: KDBatch, signal: HiddenSignal, models: Models) -> float:
    """Nats of the supervised text, per token if all share the tokenizer, else per byte."""
    own = batch if signal.view is None else batch.teacher_views[0].batch
    labels, used = flatten_tokens(own.labels), flatten_tokens(own.ce_mask) != 0
    ce = reference.cross_entropy(teacher_logits(signal, models).double(), labels)
    units = torch.ones_like(labels)
    if models.xtoken:
        units = kd_pairs.byte_lengths()[0 if signal.view is None else 1][labels]
    used = used & (units > 0)
    return (ce[used].sum() / units[used].sum()).item() if used.any() else float("inf")


def divergence(batch: KDBatch, logits: Tensor, signal: HiddenSignal, models: Models) -> Tensor:
    """Scalar sum over the tokens or text chunks of the microbatch, which has one text."""
    spec, teacher = models.kd.loss_spec(0), teacher_logits(signal, models)
    if signal.view is None:
        return reference.forward_kl(logits, teacher, spec)[flatten_tokens(batch.kd_mask) != 0].sum()
    other, pairs = batch.teacher_views[0], kd_pairs.common(torch.Generator().manual_seed(kd_pairs.PAIRS_SEED))
    total = logits.sum() * 0.0
    for chunk in range(other.chunks):
        s, t = flatten_tokens(other.student_chunk) == chunk, flatten_tokens(other.chunk) == chunk
        labels = flatten_tokens(batch.labels)[s], flatten_tokens(other.batch.labels)[t]
        total = total + partition_kl(logits[s], teacher[t], *labels, pairs, spec)
    return total


def clear_case(rank: int, world_size: int, layout: Layout) -> tuple[list[int], list[bool]]:
    """Selection if the second teacher predicts the first row perfectly, and the first teacher the second and third.

    The last row has no supervised tokens.
    """
    with parallel_state(layout):
        groups = Groups.from_megatron()
        labels = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(2))
        mask = torch.ones(4, 8)
        mask[3] = 0.0
        whole = KDBatch(labels, labels, mask, mask, labels, segment_hashes=(b"",) * 4).with_texts()
        batch = whole.on_rank(groups.cp)
        width = 96 // groups.tp.size()
        head = torch.eye(96)[groups.tp.rank() * width :][:width]
        right = 3.0 * torch.nn.functional.one_hot(batch.labels.t(), 96).float()
        shares = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]])[:, None, :, None]
        signals = tuple(HiddenSignal(share * right, head) for share in shares)
        objective = Objective(ratio=1.0, spec=LossSpec(), tokens=None)
        ensemble = EnsembleSignal(signals, (1.0, 1.0), selecting=True)
        microbatch = MicrobatchObjective.of(LossContext(groups, VOCAB), batch, objective, ensemble)
        found = Selection.of(microbatch, sequence_parallel=False)
        return found.chosen.tolist(), found.supervised.tolist()
