"""Scales KD to the size of CE (--kd-balance).

The factor of a step comes from the previous step, so it is one number for all microbatches and ranks, known before the
forward pass: the objective does not depend on microbatching or layout. It is stored in the checkpoint's arguments, so
that a resumed run equals an undisturbed one.
"""

import math
from argparse import Namespace
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def begin(args: Namespace, stored: Namespace | None) -> None:
    """Note the factor of a job's first step in its arguments, from those in the checkpoint that it continues."""
    args.kd_balance_factor = getattr(stored, "kd_balance_factor", 1.0)


def after_step(args: Namespace, losses: Mapping[str, Tensor], pp: ProcessGroup) -> None:
    """Note the factor of the next step: CE / KD of this one; the old one where KD is not there, or nothing finite.

    Args:
        args: whose `kd_balance_factor` is set, alike on all ranks: the first pipeline stage stores it.
        losses: ce and kd, means over the whole step; empty but on the last pipeline stage.
        pp: the pipeline-parallel group, which calls it together. One all-reduce of 16 bytes, for which the host waits.
    """
    found = [float(losses[name]) if name in losses else 0.0 for name in ("ce", "kd")]
    means = torch.tensor(found, dtype=torch.float64, device="cuda")
    dist.all_reduce(means, group=pp)
    ce, kd = means.tolist()
    if ce > 0.0 and kd > 0.0 and math.isfinite(ce / kd):
        args.kd_balance_factor = ce / kd
