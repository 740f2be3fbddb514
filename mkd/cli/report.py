"""Write a report of a run: one HTML page with curves, results, samples, configuration and warnings.

    mkd report runs/a
    mkd report runs/a --out a.html

Reads the --save folder of a run, finished or not. The page needs no network and no other file.
"""

import argparse
import sys
from pathlib import Path

from mkd.cli.usage import command_parser
from mkd.errors import exit_status

NAME = "report.html"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="SAVE", help="--save folder of the run")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"page to write (default: SAVE/{NAME})")
    parser.add_argument(
        "--metrics-file", type=Path, metavar="FILE", help="--kd-metrics-file of the run, if it is not in SAVE"
    )
    return parser.parse_args(argv)


def report(folder: Path, out: Path, metrics: Path | None) -> None:
    """Write the page.

    Raises:
        MkdConfigError, MkdDataError: a flag, or the folder, is invalid.
    """
    from mkd.report.html.page import write_report

    for note in write_report(folder, out, metrics).notes:
        print(f"report: {note}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command; a user error prints one line and returns exit status 1."""
    args = parse_arguments(argv)
    out = args.out or args.folder / NAME
    status = exit_status(lambda: report(args.folder, out, args.metrics_file))
    if status == 0:
        print(out)
    return status
