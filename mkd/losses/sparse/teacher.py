"""A teacher of whom each row has a few columns: what it says, and what the loss makes of it.

The categories of a row are its head, the K columns that are named, and the tail, all others together; the definitions
are in `reference_topk`. Everything here is the same on all tensor-parallel ranks and costs K numbers a row.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.reference.topk import check_temperature
from mkd.losses.rows import TokenWeights

Tail = Literal["bucket", "renormalize"]
"""What becomes of the columns that the teacher's row does not name."""


@dataclass(frozen=True)
class SparseTeacher:
    """Some columns of the teacher's rows; N rows of K slots."""

    ids: Tensor
    """[N, K] integer global ids. A negative one is an empty slot, whose other numbers are not read. Of slots with the
    same id the first counts; with `counts`, their counts are added and the first's logit is taken."""
    logits: Tensor
    """[N, K], any float dtype, at no temperature and not normalized."""
    lse: Tensor | None
    """[N] ln sum_j exp(u_j / temperature) over the true vocabulary; not needed with `tail_lse` or to renormalize."""
    tail_lse: Tensor | None = None
    """[N] the same over the columns that are not named. More exact than 1 minus the head's probability."""
    temperature: float = 1.0
    """Of the sums and of the draws."""
    counts: Tensor | None = None
    """[N, K] how often an id was drawn from softmax(u / temperature); None: the ids are the most probable ones."""

    def check(self, rows: int) -> None:
        """Raise ValueError on shapes that do not fit."""
        if self.ids.dim() != 2 or self.ids.shape[0] != rows or self.ids.is_floating_point():
            raise ValueError(f"ids is {tuple(self.ids.shape)} {self.ids.dtype}; needed: [{rows}, K] of an integer type")
        shapes = {"teacher_logits": (self.logits, self.ids.shape), "counts": (self.counts, self.ids.shape)}
        shapes |= {"teacher_lse": (self.lse, (rows,)), "teacher_tail_lse": (self.tail_lse, (rows,))}
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; needed: {list(shape)}")


@dataclass(frozen=True)
class SparseTarget:
    """The probabilities of the categories of some rows; everything of a row without a KD weight is absent."""

    ids: Tensor
    """[rows, K] int64; -1 is absent. No id stands twice in a row."""
    log_p: Tensor
    """[rows, K] ln of the category's probability, -inf where absent."""
    log_value: Tensor
    """[rows, K] what stands for ln p_k in the value: the same, but for draws the teacher's own probability."""
    log_tail: Tensor | None
    """[rows] ln of the tail's probability; None: the tail is no category, the head alone is."""
    out_of_vocab: Tensor
    """[rows] whether an id is beyond the vocabulary."""

    def __getitem__(self, rows: slice) -> "SparseTarget":
        tail = None if self.log_tail is None else self.log_tail[rows]
        return SparseTarget(self.ids[rows], self.log_p[rows], self.log_value[rows], tail, self.out_of_vocab[rows])

    @classmethod
    def of(
        cls, teacher: SparseTeacher, rows: TokenWeights, tail: Tail, spec: LossSpec, true_vocab: int
    ) -> tuple["SparseTarget", TokenWeights]:
        """The target in the dtype of the weights, and the rows with a KD weight of 0 where the teacher says nothing.

        Raises:
            ValueError: sums or draws at another temperature, draws with another divergence than forward_kl, no sum
                for the bucket, an unknown tail, or shapes that do not fit.
        """
        teacher.check(rows.labels.shape[0])
        _check(teacher, tail, spec)
        used = ~rows.unused_by_teacher()
        ids = torch.where(used & (teacher.ids >= 0), teacher.ids.long(), -1)
        if teacher.counts is not None:
            ids = torch.where(teacher.counts > 0, ids, -1)
        out_of_vocab = (ids >= true_vocab).any(dim=1)
        ids = torch.where(ids < true_vocab, ids, -1)
        first = _first_of_equal(ids)
        present = (ids >= 0) & (first == torch.arange(ids.shape[1], device=ids.device))
        dtype = rows.kd_weight.dtype
        u = (teacher.logits.to(dtype) / spec.temperature).masked_fill(~present, -torch.inf)
        if teacher.counts is not None:
            counts = torch.where(ids >= 0, teacher.counts, 0).to(dtype)
            counts = torch.zeros_like(counts).scatter_add_(1, first, counts)
            log_p, log_tail = counts.log() - counts.sum(dim=1, keepdim=True).log(), torch.full_like(u[:, 0], -torch.inf)
            log_value = u - teacher.lse.to(dtype)[:, None]
        elif tail == "bucket":
            everything = torch.cat((u, _tail_lse(teacher, u, present, true_vocab)[:, None]), dim=1).log_softmax(dim=1)
            log_p, log_tail = everything[:, :-1], everything[:, -1].masked_fill(~used[:, 0], 0.0)
            log_value = log_p
        else:
            log_value = log_p = u.log_softmax(dim=1)
            log_tail = None
        # log_softmax of nothing is NaN
        log_p, log_value = (x.masked_fill(~present, -torch.inf) for x in (log_p, log_value))
        if teacher.counts is not None or tail == "renormalize":
            says_something = present.any(dim=1) | out_of_vocab
            rows = replace(rows, kd_weight=torch.where(says_something, rows.kd_weight, 0))
        return cls(torch.where(present, ids, -1), log_p, log_value, log_tail, out_of_vocab), rows


def _check(teacher: SparseTeacher, tail: Tail, spec: LossSpec) -> None:
    if tail not in ("bucket", "renormalize"):
        raise ValueError(f"tail is {tail!r}; known are bucket and renormalize (--kd-top-k-tail)")
    if teacher.counts is not None and spec.divergence != "forward_kl":
        raise ValueError(f"sampled targets estimate forward_kl, not {spec.divergence} (--kd-loss)")
    if teacher.counts is None and tail == "renormalize":
        return
    check_temperature(spec.temperature, teacher.temperature)
    if teacher.lse is None and (teacher.counts is not None or teacher.tail_lse is None):
        raise ValueError("teacher_lse is None: the teacher's probabilities need it, or for a bucket teacher_tail_lse")


def _tail_lse(teacher: SparseTeacher, u: Tensor, present: Tensor, true_vocab: int) -> Tensor:
    """[N] logsumexp of the teacher's tail; -inf where every column is named."""
    if teacher.tail_lse is not None:
        tail = teacher.tail_lse.to(u.dtype)
    else:
        # What rounding leaves of 1 - head can be 0 or less: no more than epsilon is known of such a tail.
        lse = teacher.lse.to(u.dtype)
        rest = -torch.expm1(torch.logsumexp(u, dim=1) - lse)
        tail = lse + rest.clamp_min(torch.finfo(u.dtype).eps).log()
    return tail.masked_fill(present.sum(dim=1) == true_vocab, -torch.inf)


def _first_of_equal(ids: Tensor) -> Tensor:
    """[N, K] the first slot of the row that has the same id."""
    ordered, order = ids.sort(dim=1, stable=True)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = order.gather(1, torch.where(begins, places, 0).cummax(dim=1).values)
    return torch.empty_like(first).scatter_(1, order, first)
