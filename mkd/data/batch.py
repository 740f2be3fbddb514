"""One microbatch, the same for teacher, student and loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.errors import MkdDataError


@dataclass(frozen=True)
class KDBatch:
    """Tokens of one microbatch on this rank; b samples of s tokens."""

    tokens: Tensor
    """[b, s] int64"""
    labels: Tensor
    """[b, s] int64: the next token of each token, shifted inside its document before anything is sliced."""
    ce_mask: Tensor
    """[b, s] fp32, 1 where cross-entropy is taken."""
    kd_mask: Tensor
    """[b, s] fp32, 1 where the divergence from the teacher is taken."""
    position_ids: Tensor
    """[b, s] int64"""

    @classmethod
    def from_sample(cls, sample: Mapping[str, Tensor], true_vocab: int) -> "KDBatch":
        """Take a collated sample of `megatron.core.datasets.gpt_dataset` to the current device.

        Args:
            sample: tokens, labels, loss_mask, position_ids, each [b, s].
            true_vocab: ids from here up do not exist in the model.

        Raises:
            MkdDataError: a token id is not in the model's vocabulary.
        """
        largest = int(torch.maximum(sample["tokens"].max(), sample["labels"].max()))
        if largest >= true_vocab:
            raise MkdDataError(
                f"the data has token id {largest}, but the model's vocabulary has {true_vocab} tokens (ids up to "
                f"{true_vocab - 1}): --data-path was tokenized with another tokenizer"
            )
        # "cuda" is the CPU where mkd.cpu is active.
        on_device = {name: value.to("cuda", non_blocking=True) for name, value in sample.items()}
        mask = on_device["loss_mask"].float()
        return cls(
            tokens=on_device["tokens"],
            labels=on_device["labels"],
            ce_mask=mask,
            kd_mask=mask,
            position_ids=on_device["position_ids"],
        )

    def content_hash(self) -> Tensor:
        """[1] int64 on the batch's device: differs, but for chance, when any token, label or mask differs."""
        parts = torch.cat([t.flatten().long() for t in (self.tokens, self.labels, self.ce_mask, self.kd_mask)])
        place = torch.arange(1, parts.numel() + 1, device=parts.device)
        return ((parts + 1) * (place * 2654435761 % 2147483647)).sum().view(1)


def draw(iterator: Iterator[Mapping[str, Tensor]], count: int, true_vocab: int) -> list[KDBatch]:
    """The next `count` microbatches."""
    return [KDBatch.from_sample(next(iterator), true_vocab) for _ in range(count)]


def check_same_batch(batch: KDBatch, group: dist.ProcessGroup) -> None:
    """Raise MkdDataError unless every rank of one model replica has read the same microbatch.

    Each rank reads the data itself. Ranks that read different tokens would train on nonsense with a plausible loss.

    Args:
        batch: this rank's microbatch.
        group: the tensor- and pipeline-parallel ranks of this replica. Launches two all-reduces of 8 bytes.
    """
    low, high = batch.content_hash(), batch.content_hash()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if low.item() != high.item():
        raise MkdDataError(
            "ranks of one model replica read different tokens: make --data-path and --data-cache-path show the same "
            "files on every node, and remove a stale index cache"
        )
