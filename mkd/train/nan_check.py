"""The NaN/Inf check: all ranks stop before the optimizer step, and the message names the source."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from torch import Tensor

from mkd.checkpoint.casts import count_not_finite, listed, name_of
from mkd.data.batch import KDBatch
from mkd.errors import MkdNumericError

TEACHER = "the teacher's signal"
CE = "the student's cross-entropy"
KD = "the divergence from the teacher"
_NAMED = 3
"""The number of parameters, and of samples, that a message names."""


@dataclass
class FiniteCheck:
    """Collects flags during a step and checks them once, between the backward pass and the optimizer step.

    Megatron's own check stops the one rank that finds something, in the middle of a pass, and the other ranks wait for
    it until they time out. Here every rank finishes the pass and all of them stop together. The host does not wait for
    the device before.
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
        """Check a step. Collective over all ranks.

        Args:
            chunks: the student's model chunks in Megatron's DDP, with the step's reduced gradients.
            iteration: the present step, counted from 1; in an evaluation the last step.
            evaluating: there are no gradients.

        Raises:
            MkdNumericError: something is not finite; raised on all ranks. With Megatron's --rerun-mode
                validate_results, only after the step was run a second time, unless it is the first one.
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
        # Megatron validates nothing in the first step after a start, and the optimizer would take it.
        rerun = machine.get_mode() == RerunMode.VALIDATE_RESULTS and machine.first_iteration_complete
        rerun = rerun and not evaluating
        if everywhere.item() and not (rerun and machine.state == RerunState.INITIAL_RUN):
            again = rerun and machine.state == RerunState.RERUNNING_IN_PLACE
            self._stop(noted, [] if evaluating else chunks, iteration, evaluating, again)
        if rerun:
            # The machine runs the step again. A finite second result means a faulty device; Megatron then saves and
            # ends the job with its own exit status.
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
        # A rank's gradients may be infinite because of another rank's loss, so findings about losses come first.
        first = min(found, key=lambda text: "samples" not in text, default="a sum of gradients overflows")
        where = f"in an evaluation after iteration {iteration}" if evaluating else f"at iteration {iteration}"
        twice = ", twice with the same data" if again else ""
        raise MkdNumericError(
            f"NaN or infinity {where}{twice}, {first}{more}. No weights were changed. Inspect these samples, "
            "lower --lr or --clip-grad, or run the teacher with --kd-teacher-dtype fp32; "
            "--no-check-for-nan-in-loss-and-grad continues training"
        )


def check_loss_scale(args: Namespace, iteration: int, skipped: bool, loss_scale: float) -> None:
    """Stop an fp16 job that would skip every further step. Called on all ranks.

    Gradients that overflow are normal in fp16: the step is skipped and the loss scale halved. At the smallest scale the
    losses themselves are not finite.

    Args:
        args: Megatron's arguments.
        iteration: the finished step, counted from 1.
        skipped: the optimizer skipped it.
        loss_scale: its loss scale.

    Raises:
        MkdNumericError: on all ranks.
    """
    if args.fp16 and not args.loss_scale and skipped and loss_scale <= args.min_loss_scale:
        raise MkdNumericError(
            f"the gradients of iteration {iteration} are not finite at the smallest loss scale either "
            f"(--min-loss-scale {args.min_loss_scale:g}): all further steps would be skipped. Lower --lr, train in "
            "--bf16, or run the teacher with --kd-teacher-dtype fp32"
        )


def check_skipped(steps: int, skipped: int, loss_scale: float) -> None:
    """Stop a job whose optimizer skipped every step, so that it does not end like one that has trained.

    Args:
        steps: steps of this job.
        skipped: those without an update.
        loss_scale: the loss scale after the last one.

    Raises:
        MkdNumericError: on all ranks.
    """
    if steps and skipped == steps:
        raise MkdNumericError(
            f"all {steps} steps of this job were skipped, because gradients overflowed at every loss scale down to "
            f"{loss_scale:g}: no weight was changed. Lower --initial-loss-scale or --loss-scale, train for more steps, "
            "or train in --bf16"
        )


def check_first_weights(chunks: list[Any]) -> None:
    """Refuse to train weights that are not finite. Collective over all ranks.

    Args:
        chunks: the student's model chunks.

    Raises:
        MkdNumericError: on all ranks; names the parameters.
    """
    named = [(name, _local(param.detach())) for chunk in chunks for name, param in chunk.named_parameters()]
    findings: list[dict[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, count_not_finite(named))
    for rank, counts in enumerate(findings):
        if counts:
            dtypes = sorted({name_of(tensor.dtype) for _, tensor in named})
            raise MkdNumericError(
                f"rank {rank}: {listed(counts)} of the student are not finite before the first step ("
                f"{', '.join(dtypes)}): if its checkpoint stores them in a wider dtype, give --bf16; otherwise start "
                "from another one"
            )


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _in_passes(noted: list[tuple[str, KDBatch, Tensor]]) -> str:
    """The values that are not finite in the first affected microbatch, restricted to the likely cause."""
    bad = [(source, batch) for source, batch, finite in noted if not finite]
    if not bad:
        return ""
    batch = bad[0][1]
    sources = list(dict.fromkeys(source for source, other in bad if other is batch))
    for causes in ((TEACHER,), (CE, KD, "kd_")):  # the others are consequences
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
    """This rank's gradients: Megatron's DDP keeps them in `main_grad`, FSDP in `grad`, sharded over ranks."""
    found = getattr(param, "main_grad", None)
    found = param.grad if found is None else found
    if found is None:
        return []
    return [found.to_local() if hasattr(found, "to_local") else found]


def _gradient_buffers(chunks: list[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        if callable(chunk.buffers):  # a method of torch's modules: this is not Megatron's DDP
            yield from (grad for param in chunk.parameters() for grad in _gradients_of(param))
        else:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
