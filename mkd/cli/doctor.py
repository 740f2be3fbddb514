"""Check an environment, or the command line of a job, before it occupies a GPU.

    mkd doctor
    mkd doctor --nproc 8 --kd-config run.yaml
    mkd doctor --nproc 8 --nnodes 2 --gpu-memory-gib 80 -- --kd-teacher-hf TEACHER ...

Without the flags of a job: installed and missing packages, the cost of missing ones, and how to install them. With the
flags of mkd train after --: models, tokenizers, data, layout and memory of that job, all problems at once. No GPU
is needed; a job is checked for GPUs unless MKD_DEVICE=cpu is set. The exit status is 1 if there is a problem.
"""

import argparse
import logging
import os
import sys
from importlib.util import find_spec

from mkd.cli.usage import command_parser, parse_own
from mkd.job.doctor import environment
from mkd.job.doctor.findings import Findings
from mkd.utils.collector import uncollected

GIB = 2**30


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """The tool's flags, and the job's; None without --."""
    parser = command_parser(__doc__)
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks on each node (default: 1)")
    parser.add_argument("--nnodes", type=int, default=1, metavar="M", help="nodes (default: 1)")
    parser.add_argument(
        "--gpu-memory-gib", type=float, metavar="GIB", help="memory of one GPU (default: that of local GPUs)"
    )
    parser.add_argument(
        "--kd-config", nargs="+", metavar="FILE", help="files with the flags of a job; flags after -- replace theirs"
    )
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="samples shown per data file (default: 2)")
    parser.add_argument(
        "--sample-tokens", type=int, default=60, metavar="N", help="tokens shown per sample (default: 60)"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    own, flags = parse_own(parser, argv[:split]), argv[split + 1 :]
    if own.nproc < 1 or own.nnodes < 1:
        parser.error(f"--nproc is {own.nproc} and --nnodes {own.nnodes}; both must be at least 1")
    if own.kd_config is not None:
        return own, ["--kd-config", *own.kd_config, *flags]
    return own, flags if split < len(argv) else None


def report_environment() -> int:
    """Print all parts. Returns 1 if nothing can be trained here."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    with console.status("inspecting the environment"):
        parts = environment.inspect()
    width = max(len(part.name) for part in parts)
    for part in parts:
        line = Text(f"{part.name:{width}s}  ").append(part.found or "missing", style=_color(part))
        line.append(f": {part.trouble} -> {part.remedy}" if part.trouble else "")
        console.print(line, soft_wrap=True)
    failing = [part.name for part in parts if part.needed]
    if failing:
        console.print(f"nothing can be trained here: {', '.join(failing)}", style="red")
    else:
        optional = "; what is missing is optional" if any(part.found is None for part in parts) else ""
        console.print(f"all that training needs is here{optional}", style="green", highlight=False)
    return 1 if failing else 0


def _color(part: environment.Part) -> str:
    return "red" if part.needed else "yellow" if part.trouble else "green"


def examine_run(own: argparse.Namespace, flags: list[str]) -> int:
    """Print the plan, a preview of the data, the memory and all problems. Returns 1 if there is a problem."""
    cards = environment.cards()
    with uncollected():
        from mkd import cpu
        from mkd.compat.startup import read_help_texts_once, use_prebuilt_dataset_helpers

        stands_in = os.environ.get(cpu.DEVICE_VARIABLE, "").lower() != "cpu"
        cpu.activate(stands_in, environment.lowest_capability(cards))
        use_prebuilt_dataset_helpers()
        read_help_texts_once()
        logging.disable(logging.WARNING)
        from rich.console import Console

        from mkd.job.doctor.report import check_cards, check_memory, print_findings, show_data, show_plan
        from mkd.job.doctor.run import Launch, check_disk, examine

    findings, console = Findings(elsewhere=not cards and not cpu.is_target()), Console()
    none_here = "" if cards else f" (there is none here; {cpu.DEVICE_VARIABLE}=cpu mkd doctor ... checks a run on CPU)"
    target = f"CPU ({cpu.DEVICE_VARIABLE}=cpu)" if cpu.is_target() else f"GPUs{none_here}"
    console.print(f"ranks: {own.nproc * own.nnodes}, nodes: {own.nnodes}, on {target}", highlight=False, soft_wrap=True)
    with console.status("reading flags, checkpoints, tokenizers and data"):
        job = examine(Launch(flags, own.nproc * own.nnodes), findings)
    if job is None:
        findings.warning("layout and memory are reported once the flags are consistent")
    else:
        show_plan(job, findings, console)
        show_data(job, own.samples, own.sample_tokens, findings, console)
        capacity = own.gpu_memory_gib or min((card.gib for card in cards), default=None)
        check_memory(job, capacity, findings, console, is_one_node=own.nnodes == 1)
        check_disk(job.args, findings)
        if not cpu.is_target():
            check_cards(job, len(cards), own.nproc, findings)
    print_findings(findings, console)
    return 1 if findings.problems else 0


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    own, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    if find_spec("rich") is None:
        print("the package rich is missing, and so are probably others: pip install . (in mkd's checkout)")
        return 1
    return report_environment() if flags is None else examine_run(own, flags)
