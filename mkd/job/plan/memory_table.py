"""The memory estimate of a job as a line of the plan and as a table."""

import os

from rich.console import Console
from rich.table import Table

from mkd import cpu
from mkd.errors import MkdConfigError
from mkd.job.job import Job
from mkd.job.memory import PARTS, StageMemory, Workload, estimate, fullest, offloaded_bytes, outside_of_torch
from mkd.utils.host_memory import free_host_bytes

GIB = 2**30


def workload(job: Job) -> Workload:
    """The inputs of the memory estimate, from a job."""
    teachers = [] if job.kd.is_plain_pretraining else job.teacher.models
    return Workload(
        job.args,
        teachers,
        job.kd,
        on_gpu=not cpu.is_target(),
        lora=job.lora,
        served=[] if job.kd.is_plain_pretraining else job.teacher.served,
        shares_teacher=job.shares_teacher,
    )


def memory_line(job: Job) -> str:
    """Estimate of the fullest rank in one line."""
    stage = fullest(estimate(workload(job)))
    listed = ", ".join(f"{name} {stage.peak_parts[name] / GIB:.2f}" for name in PARTS if name in stage.peak_parts)
    process = "; the process itself (Python, libraries) comes on top" if cpu.is_target() else ""
    return f"about {stage.peak / GIB:.2f} GiB on the fullest rank ({stage.peak_phase}): {listed}{process}"


def offload_line(job: Job) -> str:
    """The host memory of --kd-rollout-offload in one line; empty without the flag."""
    size = offloaded_bytes(workload(job))
    return f"optimizer state in host memory while texts are written, {size / 1e9:.2f} GB on each rank" if size else ""


def check_host_memory(job: Job) -> None:
    """Refuse --kd-rollout-offload where the ranks of this machine need more host memory than is free.

    Raises:
        MkdConfigError: they do.
    """
    size, ranks = offloaded_bytes(workload(job)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free = free_host_bytes()
    if free is not None and ranks * size > free:
        raise MkdConfigError(
            f"--kd-rollout-offload takes {size / 1e9:.2f} GB of host memory on each rank, {ranks * size / 1e9:.2f} GB "
            f"on this machine, but {free / 1e9:.2f} GB are free: leave it out, or give --use-distributed-optimizer, "
            "which divides the state among data-parallel ranks"
        )


def print_memory(job: Job) -> None:
    """Print the estimate of every pipeline stage, part by part, in GiB per rank; rank 0 only."""
    if job.args.rank != 0:
        return
    console = Console()
    stages = estimate(workload(job))
    outside = (
        None if cpu.is_target() else [outside_of_torch(job.args, stage.peak, job.teacher.models) for stage in stages]
    )
    console.print(memory_table(stages, outside))
    if any(_is_outside_peak(stage, part) for stage in stages for part in PARTS):
        console.print("  (in parentheses: not allocated at the time of the peak)", highlight=False)


def memory_table(stages: list[StageMemory], outside: list[float] | None) -> Table:
    """Table with one row per part and one column per pipeline stage.

    Args:
        stages: all pipeline stages.
        outside: bytes outside of torch's count, per stage; None on CPU.
    """
    device = "" if outside else ", on CPU"
    table = Table(title=f"memory of each rank in GiB{device}", title_justify="left")
    table.add_column("part")
    for stage in stages:
        table.add_column("all ranks" if len(stages) == 1 else f"stage {stage.stage}", justify="right")
    for part in PARTS:
        if any(stage.most(part) for stage in stages):
            table.add_row(part, *(_cell(stage, part) for stage in stages))
    table.add_section()
    table.add_row("peak that torch counts" if outside else "peak", *(f"{stage.peak / GIB:.2f}" for stage in stages))
    table.add_row("reached in", *(stage.peak_phase for stage in stages))
    if outside is None:
        return table
    table.add_row("allowance: CUDA, NCCL, fragments", *(f"{size / GIB:.2f}" for size in outside))
    totals = (stage.peak + size for stage, size in zip(stages, outside, strict=True))
    table.add_row("needed", *(f"{total / GIB:.2f}" for total in totals), style="bold")
    return table


def _is_outside_peak(stage: StageMemory, part: str) -> bool:
    """True if the part is allocated, but not in the phase of the peak."""
    return part not in stage.peak_parts and stage.most(part) > 0


def _cell(stage: StageMemory, part: str) -> str:
    text = f"{stage.most(part) / GIB:.2f}"
    return f"({text})" if _is_outside_peak(stage, part) else f"{stage.peak_parts.get(part, 0.0) / GIB:.2f}"
