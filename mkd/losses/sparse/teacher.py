"""A sparse teacher, which lists a few columns per token, and the targets that the loss derives from it.

The categories of a token are the K top columns, those that the teacher lists, and the tail, all others together; the
definitions are in `reference.topk`. Everything here is the same on all tensor-parallel ranks and costs K numbers per
token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.inputs import TokenWeights, tempered_dtype

Tail = Literal["bucket", "renormalize"]
"""Treatment of the columns that are not listed: one more category, or none (both models are renormalized)."""


@dataclass(frozen=True)
class SparseTeacher:
    """Some logits of a teacher for each of N tokens, in K slots: the most probable ones, or sampled ones.

    Losses take it with N tokens in one dimension; signals hold it as [b, s], see `flatten_tokens`.
    """

    ids: Tensor
    """[N, K] integer global ids. A negative one is an empty slot, whose other numbers are not read. Of slots with the
    same id the first counts; with `counts`, their counts are added and the first's logit is used."""
    logits: Tensor
    """[N, K], any float dtype, at no temperature and not normalized."""
    lse: Tensor | None
    """[N] ln sum_j exp(u_j / temperature) over the true vocabulary; not needed with `tail_lse` or to renormalize."""
    tail_lse: Tensor | None = None
    """[N] the same over the columns that are not listed. More exact than 1 minus the probability of the top columns."""
    temperature: float = 1.0
    """Temperature of the sums and of the sampling."""
    counts: Tensor | None = None
    """[N, K] how often an id was sampled from softmax(u / temperature); None: the ids are the most probable ones."""

    def flatten_tokens(self) -> "SparseTeacher":
        """[b, s, ...] -> [s * b, ...], the order in which Megatron's [s, b, H] activations flatten."""
        return self._map(lambda values: values.transpose(0, 1).flatten(0, 1))

    def select(self, index: Tensor) -> "SparseTeacher":
        """The tokens [M] of an index into the N."""
        return self._map(lambda values: values.index_select(0, index))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "SparseTeacher":
        """The same function of each tensor."""
        tensors = {name: getattr(self, name) for name in ("ids", "logits", "lse", "tail_lse", "counts")}
        return replace(self, **{name: None if x is None else change(x) for name, x in tensors.items()})

    def check(self, tokens: int) -> None:
        """Raise ValueError on shapes that do not fit."""
        if self.ids.dim() != 2 or self.ids.shape[0] != tokens or self.ids.is_floating_point():
            raise ValueError(
                f"ids is {tuple(self.ids.shape)} {self.ids.dtype}; needed: [{tokens}, K] of an integer type"
            )
        shapes = {"teacher_logits": (self.logits, self.ids.shape), "counts": (self.counts, self.ids.shape)}
        shapes |= {"teacher_lse": (self.lse, (tokens,)), "teacher_tail_lse": (self.tail_lse, (tokens,))}
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; needed: {list(shape)}")


@dataclass(frozen=True)
class SparseTarget:
    """The teacher's probabilities of the categories; a token without a KD weight has no top columns."""

    ids: Tensor
    """[N, K] int64; -1 is absent. No id occurs twice in a token."""
    log_p: Tensor
    """[N, K] ln of the category's probability, -inf where absent."""
    log_value: Tensor
    """[N, K] stands for ln p_k in the value: the same, but for sampled targets the teacher's own probability."""
    log_tail: Tensor | None
    """[N] ln of the tail's probability; None: the tail is not a category."""
    out_of_vocab: Tensor
    """[N] bool: an id is beyond the vocabulary."""

    def __getitem__(self, tokens: slice) -> "SparseTarget":
        tail = None if self.log_tail is None else self.log_tail[tokens]
        return SparseTarget(
            self.ids[tokens], self.log_p[tokens], self.log_value[tokens], tail, self.out_of_vocab[tokens]
        )

    @classmethod
    def of(
        cls, teacher: SparseTeacher, tokens: TokenWeights, tail: Tail, spec: LossSpec, true_vocab: int
    ) -> tuple["SparseTarget", TokenWeights]:
        """The target in the dtype of the weights (float64 at a high temperature), and the tokens.

        The tokens have a KD weight of 0 where the teacher lists nothing.

        Raises:
            ValueError: sums or samples at another temperature, samples with another divergence than forward_kl, no sum
                for the bucket, an unknown tail, or shapes that do not fit.
        """
        teacher.check(tokens.labels.shape[0])
        _check(teacher, tail, spec)
        used = ~tokens.unused_by_teacher()
        ids = torch.where(used & (teacher.ids >= 0), teacher.ids.long(), -1)
        if teacher.counts is not None:
            ids = torch.where(teacher.counts > 0, ids, -1)
        out_of_vocab = (ids >= true_vocab).any(dim=1)
        ids = torch.where(ids < true_vocab, ids, -1)
        first = _first_of_equal(ids)
        present = (ids >= 0) & (first == torch.arange(ids.shape[1], device=ids.device))
        dtype = tempered_dtype(tokens.kd_weight.dtype, spec.temperature)
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
            has_columns = present.any(dim=1) | out_of_vocab
            tokens = replace(tokens, kd_weight=torch.where(has_columns, tokens.kd_weight, 0))
        return cls(torch.where(present, ids, -1), log_p, log_value, log_tail, out_of_vocab), tokens


def check_temperature(loss: float, targets: float) -> None:
    """Raise ValueError unless the teacher's sums are at the temperature of the loss."""
    if loss != targets:
        raise ValueError(
            f"the temperature is {loss:g} and the teacher's logsumexp and samples are at {targets:g}: a tail's "
            "probability at one temperature does not follow from that at another"
        )


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
    """[N] logsumexp of the teacher's tail; -inf where every column is listed."""
    if teacher.tail_lse is not None:
        tail = teacher.tail_lse.to(u.dtype)
    else:
        # Rounding may leave 0 or less of 1 - the top columns' probability: such a tail is known to epsilon at most.
        lse = teacher.lse.to(u.dtype)
        rest = -torch.expm1(torch.logsumexp(u, dim=1) - lse)
        tail = lse + rest.clamp_min(torch.finfo(u.dtype).eps).log()
    return tail.masked_fill(present.sum(dim=1) == true_vocab, -torch.inf)


def _first_of_equal(ids: Tensor) -> Tensor:
    """[N, K] the first slot of the token that has the same id."""
    ordered, order = ids.sort(dim=1, stable=True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = order.gather(1, torch.where(starts, positions, 0).cummax(dim=1).values)
    return torch.empty_like(first).scatter_(1, order, first)
