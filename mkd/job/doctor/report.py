"""The doctor's report on a job: plan, data, memory, problems."""

from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mkd import cpu
from mkd.config.megatron import data_args
from mkd.config.megatron.fp8_teacher import MIN_FP8_CAPABILITY
from mkd.data.sources.preview import BEGIN, END
from mkd.job.doctor import split
from mkd.job.doctor.findings import Findings
from mkd.job.doctor.peek import CONTEXT, TARGET, peek
from mkd.job.job import Job
from mkd.job.memory.advice import advise, needed
from mkd.job.plan.memory_table import print_memory, workload
from mkd.job.plan.plan import WARNING, plan
from mkd.job.plan.warnings import job_warnings

GIB = 2**30


def show_plan(job: Job, findings: Findings, console: Console) -> None:
    """Print the plan of the job, and collect its warnings."""
    table = Table(show_header=False, box=None, title="plan", title_justify="left")
    for name, text in plan(job).items():
        if name not in ("memory", WARNING):
            table.add_row(name, escape(text))
    console.print(table)
    for text in job_warnings(job):
        findings.warning(text)


def show_data(job: Job, samples: int, tokens: int, findings: Findings, console: Console) -> None:
    """Print the first tokens of a few samples per file, targets in color and signs, if all files can be read."""
    with findings.tolerate():
        names = data_args.data_prefixes(job.args)
        starts = tuple(start for name in names for start in (f"--data-path {name}", f"{name}, line"))
        if any(problem.startswith(starts) for problem in findings.problems):
            return
        for reading in job.data.readings():
            text = f"{reading.split} reads {reading.name}: {reading}, of about {reading.per_epoch} rows"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            if reading.warning is not None:
                findings.warning(reading.warning)
        console.print(
            Text("data: ").append(f"{BEGIN}target{END}", style=TARGET).append(", ").append("context", style=CONTEXT)
        )
        with console.status("reading samples"):
            show = partial(console.print, markup=False, highlight=False)
            peek(job, names, samples, tokens, show, findings.warning)
        verb = "split" if job.kd.long_samples == "split" else "dropped"
        for layout in job.data.row_layouts[1:]:  # these samples are not counted: no teacher's tokenizer runs here
            if layout.is_limited:
                findings.warning(
                    f"samples longer than {layout.limit}, in its tokens, are {verb} (--kd-long-samples); its rows have "
                    f"{layout.row_length}"
                )


def check_memory(
    job: Job, capacity_gib: float | None, findings: Findings, console: Console, *, is_one_node: bool
) -> None:
    """Print the memory table, a split of the GPUs, and changes that save memory if the job does not fit.

    Args:
        job: the run.
        capacity_gib: memory of a GPU; None if unknown.
        findings: collects a problem if it does not fit.
        console: where to print.
        is_one_node: True if the job runs on one node, where mkd launch can split the GPUs.
    """
    print_memory(job)
    if cpu.is_target():
        return
    if capacity_gib is None:
        findings.warning("this machine has no GPU to compare the memory with: give --gpu-memory-gib")
        return
    work = workload(job)
    need = needed(work)
    if is_one_node and (proposed := split.advice(work, capacity_gib * GIB)) is not None:
        console.print(proposed, highlight=False, soft_wrap=True)
    if need <= capacity_gib * GIB:
        console.print(f"{need / GIB:.1f} of {capacity_gib:.1f} GiB of GPU memory", highlight=False)
        return
    alone, together = advise(work, capacity_gib * GIB)
    table = Table("flags", "saves GiB", "needs then", title="what would save memory", title_justify="left")
    for advice in alone:
        table.add_row(advice.flags, f"{advice.saves / GIB:.1f}", f"{advice.needed / GIB:.1f}")
    console.print(table)
    remedy = "use more GPUs, larger GPUs, or smaller models"
    if together is not None:
        remedy = f"give {together.flags} ({together.needed / GIB:.1f} GiB then)"
    elif alone:
        remedy = f"all of the above is not enough: {remedy}"
    findings.problem(
        f"memory: a rank needs about {need / GIB:.1f} GiB, a GPU has {capacity_gib:.1f} GiB (--gpu-memory-gib): "
        + remedy
    )


def check_cards(job: Job, cards: int, per_node: int, findings: Findings) -> None:
    """Warn of what the training machine may lack, judged by this one.

    Args:
        job: the examined job.
        cards: GPUs of this machine.
        per_node: ranks of each node.
        findings: collects the warnings.
    """
    args = job.args
    if 0 < cards < per_node:
        findings.warning(f"--nproc is {per_node}, this machine has {cards} GPUs")
    capability = cpu.compute_capability()
    fp8 = {"--kd-teacher-dtype fp8": job.kd.teacher_dtype == "fp8", f"--fp8-format {args.fp8}": args.fp8}
    if capability is None:
        for flag in (flag for flag, is_given in fp8.items() if is_given):
            lowest = ".".join(map(str, MIN_FP8_CAPABILITY))
            findings.warning(
                f"{flag} needs GPUs of compute capability {lowest} or higher; that of the job's GPUs is unknown here"
            )
    if args.fp8 or args.fp4:
        findings.warning("memory is estimated as if --fp8-format and --fp4-format were not given")


def print_findings(findings: Findings, console: Console) -> None:
    """Print the problems and warnings."""
    for title, style, sentences in (
        ("problem", "red", findings.problems),
        ("warning", "yellow", findings.warnings),
    ):
        for sentence in sentences:
            console.print(Text(f"{title}: ", style=style).append(sentence, style="default"), soft_wrap=True)
    counts = f"problems: {len(findings.problems)}, warnings: {len(findings.warnings)}"
    console.print(counts, style="red" if findings.problems else "green", highlight=False)
