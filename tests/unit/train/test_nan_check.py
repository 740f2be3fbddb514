"""Steps with numbers that are not finite."""

import re
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState

from mkd.config.loss_spec import LossSpec
from mkd.data.batch import KDBatch
from mkd.errors import MkdNumericError
from mkd.teacher.interface import HiddenSignal
from mkd.train import nan_check as guards
from mkd.train.nan_check import FiniteCheck, check_first_weights, check_loss_scale, check_skipped
from mkd.train.objective import LossContext, MicrobatchObjective, Objective
from mkd.train.step import MicrobatchLoss
from mkd.train.step_tokens import StepTokens

KEY = bytes(range(16))


class Chunk(torch.nn.Module):
    """Like megatron's DDP: each parameter's gradient is a part of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        gradients = torch.zeros(4)
        self.first.main_grad, self.second.main_grad = gradients.chunk(2)
        self.buffers = [SimpleNamespace(grad_data=gradients)]
        self.expert_parallel_buffers = []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """megatron's rerun machine, switched off, of a job of one rank."""
    one = SimpleNamespace(get_mode=lambda: one.mode, mode=RerunMode.DISABLED, state=RerunState.INITIAL_RUN, asked=[])
    one.first_iteration_complete = True
    one.validate_result = lambda *, result, **rest: one.asked.append(result.item())
    monkeypatch.setattr(guards, "get_rerun_state_machine", lambda: one)
    alone = SimpleNamespace(
        ReduceOp=torch.distributed.ReduceOp,
        all_reduce=lambda *_, **__: None,
        all_gather_object=lambda into, mine: into.__setitem__(0, mine),
        get_world_size=lambda: 1,
    )
    monkeypatch.setattr(guards, "dist", alone)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))
    return one


def head_loss(check: FiniteCheck, hidden: torch.Tensor, kd_mask: torch.Tensor) -> MicrobatchLoss:
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    context = LossContext(SimpleNamespace(tp=one), true_vocab=9)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    batch = KDBatch(tokens, tokens, torch.ones(2, 3), kd_mask, tokens, segment_hashes=(KEY, KEY))
    objective = Objective(0.5, LossSpec(), StepTokens(batch.ce_mask.sum(), batch.kd_mask.sum()))
    signal = HiddenSignal(hidden, torch.zeros(9, 4))
    return MicrobatchLoss(MicrobatchObjective.of(context, batch, objective, signal), check)


def test_a_teacher_that_is_not_finite_is_named(machine: SimpleNamespace) -> None:
    check, hidden, mask = FiniteCheck(), torch.zeros(3, 2, 4), torch.ones(2, 3)
    hidden[2, 1, 3] = torch.nan
    head_loss(check, hidden, mask).report(torch.full((), torch.nan))
    with pytest.raises(MkdNumericError, match=rf"at iteration 7, rank 0: the teacher's signal in .* {KEY.hex()} "):
        check.after_pass([Chunk()], 7, evaluating=False)
    mask[1, 2] = 0  # sample 1, position 2: not distilled
    head_loss(check, hidden, mask).report(torch.zeros(()))
    check.after_pass([Chunk()], 7, evaluating=False)


def test_gradients_that_are_not_finite_are_named(machine: SimpleNamespace) -> None:
    check, chunk = FiniteCheck(), Chunk()
    chunk.second.main_grad[1] = torch.inf
    with pytest.raises(MkdNumericError, match=re.escape("at iteration 3, rank 0: the gradients of second. ")):
        check.after_pass([chunk], 3, evaluating=False)
    check.after_pass([chunk], 3, evaluating=True)  # has none of its own


def test_with_megatrons_rerun_it_takes_two_times(machine: SimpleNamespace) -> None:
    check, chunk = FiniteCheck(), Chunk()
    machine.mode = RerunMode.VALIDATE_RESULTS
    check.after_pass([chunk], 1, evaluating=False)
    chunk.first.main_grad[0] = torch.nan
    check.after_pass([chunk], 2, evaluating=False)
    assert machine.asked == [0.0, 1.0]
    machine.state = RerunState.RERUNNING_IN_PLACE
    with pytest.raises(MkdNumericError, match="twice with the same data"):
        check.after_pass([chunk], 2, evaluating=False)


def test_the_first_step_is_not_made_again(machine: SimpleNamespace) -> None:
    chunk = Chunk()
    machine.mode, machine.first_iteration_complete = RerunMode.VALIDATE_RESULTS, False
    chunk.first.main_grad[0] = torch.nan
    with pytest.raises(MkdNumericError):
        FiniteCheck().after_pass([chunk], 1, evaluating=False)


def test_only_at_the_smallest_loss_scale_is_an_overflow_in_fp16_an_error() -> None:
    args = Namespace(fp16=True, loss_scale=None, min_loss_scale=1.0)
    check_loss_scale(args, 7, skipped=True, loss_scale=2.0)
    check_loss_scale(args, 7, skipped=False, loss_scale=1.0)
    check_loss_scale(Namespace(fp16=False, loss_scale=None, min_loss_scale=1.0), 7, skipped=True, loss_scale=1.0)
    with pytest.raises(MkdNumericError, match=r"gradients of iteration 7 .*--min-loss-scale 1"):
        check_loss_scale(args, 7, skipped=True, loss_scale=1.0)


@pytest.mark.parametrize("steps, skipped, ends", [(0, 0, True), (3, 2, True), (3, 3, False), (1, 1, False)])
def test_a_job_that_skipped_every_step_fails(steps: int, skipped: int, ends: bool) -> None:
    if ends:
        check_skipped(steps, skipped, 8.0)
        return
    with pytest.raises(MkdNumericError, match=rf"all {steps} steps of this job were skipped.* 8: no weight"):
        check_skipped(steps, skipped, 8.0)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_first_weights_that_are_not_finite_are_refused(value: float, machine: SimpleNamespace) -> None:
    chunk = Chunk()
    check_first_weights([chunk])
    chunk.second.data[:] = value
    with pytest.raises(MkdNumericError, match=r"rank 0: 2 values of second of the student are not finite .*--bf16"):
        check_first_weights([chunk])
