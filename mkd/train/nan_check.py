"""Numbers that are not finite end the run before the optimizer sees them, on all ranks, with their source."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.errors import MkdNumericError

TEACHER = "the teacher's signal"
CE = "the student's cross-entropy"
KD = "the divergence from the teacher"
_NAMED = 3
"""So many parameters, and samples, are named in a message."""


@dataclass
class FiniteCheck:
    """Collects what a step computes, and judges it once, between the backward pass and the optimizer.

    megatron's own check stops the one rank that has found something, in the middle of a pass: the others wait for it
    until they time out. Here every rank goes on to the end of the pass and all of them stop together. Nothing waits
    for the device before.
    """

    _noted: list[tuple[str, KDBatch, Tensor]] = field(default_factory=list)

    def note(self, values: Mapping[str, Tensor], batch: KDBatch) -> None:
        """Keep tensors for the check.

        Args:
            values: name in the message -> tensor of any shape; a sum is not finite if any of its terms is not.
            batch: the microbatch that they were computed from.
        """
        self._noted += [(source, batch, torch.isfinite(value.detach()).all()) for source, value in values.items()]

    def after_pass(self, chunks: list[Any], iteration: int, evaluating: bool) -> None:
        """Judge a step. Collective over all ranks.

        Args:
            chunks: the student's model chunks in megatron's DDP, with the step's reduced gradients.
            iteration: the present step, counted from 1; of an evaluation the last one.
            evaluating: whether there are no gradients.

        Raises:
            MkdNumericError: something was not finite, on all ranks alike; when megatron's --rerun-mode is
                validate_results, only after the step was made a second time, unless it is the first one.
        """
        noted, self._noted = self._noted, []
        buffers = [] if evaluating else list(_gradient_buffers(chunks))
        flags = [flag for _, _, flag in noted]
        flags += [torch.isfinite(buffer.sum(dtype=torch.float32)) for buffer in buffers]
        mine = torch.zeros((), device="cuda")
        if flags:
            mine = 1.0 - torch.stack(flags).all().float()
        everywhere = mine.clone()
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        machine = get_rerun_state_machine()
        # megatron judges nothing in the first step after a start, and would let the optimizer take it.
        rerun = machine.get_mode() == RerunMode.VALIDATE_RESULTS and machine.first_iteration_complete
        rerun = rerun and not evaluating
        if everywhere.item() and not (rerun and machine.state == RerunState.INITIAL_RUN):
            again = rerun and machine.state == RerunState.RERUNNING_IN_PLACE
            self._stop(noted, [] if evaluating else chunks, iteration, evaluating, again)
        if rerun:
            # It has the step made once more. That the second time is as it should be means a faulty device; megatron
            # then saves and ends the job with its own exit status.
            machine.validate_result(
                result=mine,
                rejection_func=bool,
                message="found numbers that are not finite",
                tolerance=0.0,
                fatal=True,
            )

    def _stop(
        self,
        noted: list[tuple[str, KDBatch, Tensor]],
        chunks: list[Any],
        iteration: int,
        evaluating: bool,
        again: bool,
    ) -> None:
        findings: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(findings, "; ".join(filter(None, (_in_passes(noted), _in_gradients(chunks)))))
        found = [f"rank {rank}: {text}" for rank, text in enumerate(findings) if text]
        more = f" (and on {len(found) - 1} more ranks)" if len(found) > 1 else ""
        # A rank's gradients are not finite because of another's loss: what has a loss comes first.
        first = min(found, key=lambda text: "samples" not in text, default="a sum of gradients overflows")
        where = f"in an evaluation after iteration {iteration}" if evaluating else f"at iteration {iteration}"
        twice = ", twice with the same data" if again else ""
        raise MkdNumericError(
            f"NaN or infinity {where}{twice}, {first}{more}. No weight was changed by it. Look at these samples, lower "
            "--lr or --clip-grad, or let the teacher compute in --kd-teacher-dtype fp32; "
            "--no-check-for-nan-in-loss-and-grad trains on"
        )


def check_loss_scale(args: Namespace, iteration: int, skipped: bool, loss_scale: float) -> None:
    """Stop a job in fp16 that would skip every step from now on. Called on all ranks.

    Gradients that overflow are normal there: the step is skipped and the scale halved. At the smallest scale nothing is
    left to be halved, and the losses themselves are not finite.

    Args:
        args: Megatron's.
        iteration: the step that was made, counted from 1.
        skipped: whether the optimizer left it out.
        loss_scale: with which it was made.

    Raises:
        MkdNumericError: on all ranks.
    """
    if args.fp16 and not args.loss_scale and skipped and loss_scale <= args.min_loss_scale:
        raise MkdNumericError(
            f"the gradients of iteration {iteration} are not finite at the smallest loss scale either "
            f"(--min-loss-scale {args.min_loss_scale:g}): no step would be made any more. Lower --lr, train in --bf16, "
            "or let the teacher compute in --kd-teacher-dtype fp32"
        )


def _in_passes(noted: list[tuple[str, KDBatch, Tensor]]) -> str:
    """What of the first microbatch that has something was not finite: the cause, as far as it can be told."""
    bad = [(source, batch) for source, batch, finite in noted if not finite]
    if not bad:
        return ""
    batch = bad[0][1]
    sources = list(dict.fromkeys(source for source, other in bad if other is batch))
    for causes in ((TEACHER,), (CE, KD, "kd_")):  # the rest follows from these
        sources = [source for source in sources if source.startswith(causes)] or sources
    keys = [key.hex() for key in batch.segment_hashes[:_NAMED]]
    more = f" and {len(batch.segment_hashes) - _NAMED} more" if len(batch.segment_hashes) > _NAMED else ""
    return f"{', '.join(sources)} in microbatch {batch.number} of the samples {' '.join(keys)}{more}"


def _in_gradients(chunks: list[Any]) -> str:
    named = (item for chunk in chunks for item in chunk.named_parameters())
    bad = [name for name, param in named if not all(torch.isfinite(grad).all() for grad in _gradients_of(param))]
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f"the gradients of {' '.join(bad[:_NAMED])}{more}" if bad else ""


def _gradients_of(param: Tensor) -> list[Tensor]:
    """This rank's: megatron's DDP has them in `main_grad`, FSDP in `grad`, cut over ranks."""
    found = getattr(param, "main_grad", None)
    found = param.grad if found is None else found
    if found is None:
        return []
    return [found.to_local() if hasattr(found, "to_local") else found]


def _gradient_buffers(chunks: list[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        if callable(chunk.buffers):  # of torch's modules: this is not megatron's DDP
            yield from (grad for param in chunk.parameters() for grad in _gradients_of(param))
        else:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
