"""Scales KD to the size of CE (--kd-balance).

The factor of a step comes from the previous step, so it is one number for all microbatches and ranks, known before the
forward pass: the objective does not depend on microbatching or layout. A checkpoint holds it (`RunState`), so
that a resumed run equals an undisturbed one.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.config.run_state import RunState


def after_step(state: RunState, losses: Mapping[str, Tensor], pp: ProcessGroup) -> None:
    """Set the factor of the next step to CE / KD of this one; unchanged without KD or where the quotient is not finite.

    Args:
        state: its `balance_factor` is set, equal on all ranks: the first pipeline stage stores it.
        losses: ce and kd, means over the whole step; empty except on the last pipeline stage.
        pp: the pipeline-parallel group. Collective: one all-reduce of 16 bytes, for which the host waits.
    """
    found = [float(losses[name]) if name in losses else 0.0 for name in ("ce", "kd")]
    means = torch.tensor(found, dtype=torch.float64, device="cuda")
    dist.all_reduce(means, group=pp)
    ce, kd = means.tolist()
    if ce > 0.0 and kd > 0.0 and math.isfinite(ce / kd):
        state.balance_factor = ce / kd
