"""Disturbs mkd at random and checks that every outcome is bit-equal to an undisturbed run or refused in one line.

    bash tests/chaos/run.sh --minutes 30 --seed 7
    bash tests/chaos/run.sh --only fuzz=3000 --only flags=600
    bash tests/chaos/run.sh --seed 7 --only fuzz --case 123     one case again

Exit status 1 if there is a finding. --out has report.json and the files of the last cases.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.chaos.lab import Experiment, Lab, Report, run_experiments
from tests.chaos.sandbox import Faults, faults, prepare

SMALL = {"signals": 1, "calls": 1, "disk": 1, "places": 1, "fuzz": 4, "flags": 2, "readers": 40}
"""Cases of --small: every experiment, and every part of this program, in under 40 s."""


def experiments_of(lab: Lab) -> dict[str, Callable[[], Experiment]]:
    """Name -> experiment, made when it is run."""
    from tests.chaos.disturbances import Disturbances
    from tests.chaos.file_calls import FileCalls
    from tests.chaos.fuzz import Fuzz
    from tests.chaos.jobs import Trainings
    from tests.chaos.random_flags import RandomFlags
    from tests.chaos.random_signals import RandomSignals
    from tests.chaos.readers import Readers

    trainings, fuzz = cache(lambda: Trainings(lab)), cache(lambda: Fuzz(lab))
    makers: dict[str, Callable[[], Experiment]] = {
        "signals": lambda: RandomSignals(lab, trainings()),
        "places": lambda: Disturbances(lab, trainings()),
        "fuzz": fuzz,
        "flags": lambda: RandomFlags(lab, fuzz()),
        "readers": lambda: Readers(lab),
    }
    if lab.faults is None:
        print("no C compiler: saves are not disturbed at their calls")
    else:
        makers["calls"] = lambda: FileCalls(lab, trainings(), Faults.KILL)
        makers["disk"] = lambda: FileCalls(lab, trainings(), Faults.FAIL)
    return makers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop starting cases after this time (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default 0)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME[=CASES]", help="an experiment; repeatable")
    parser.add_argument("--case", type=int, help="run this case of the one experiment in --only")
    parser.add_argument("--first", type=int, default=0, help="start with this case, to continue an earlier session")
    parser.add_argument("--small", action="store_true", help="a few cases of every experiment")
    parser.add_argument("--soak", action="store_true", help="one long training instead: see tests/chaos/soak.py")
    parser.add_argument("--steps", type=int, default=2000, help="of --soak (default 2000)")
    parser.add_argument("--out", type=Path, help="folder to work in (default: a temporary one, removed at the end)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    started = time.monotonic()
    prepare()
    # Not a TemporaryDirectory: jobs are forks of this process, and each would remove it at its end.
    temporary = None if args.out is not None else Path(tempfile.mkdtemp(prefix="chaos"))
    try:
        return run_session(args, (args.out or temporary).resolve(), started)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def run_session(args: argparse.Namespace, root: Path, started: float) -> int:
    """Run what the command line asks for; the exit status.

    Args:
        args: the command line.
        root: the folder to work in.
        started: time of `time.monotonic` from which --minutes counts.
    """
    root.mkdir(parents=True, exist_ok=True)
    lab = Lab(root, args.seed, faults(), args.small)
    if args.soak:
        from tests.chaos.soak import soak

        facts = soak(lab, args.steps)
        print(json.dumps(facts, indent=1))
        return int(not facts["flat"])
    makers = experiments_of(lab)
    names = dict(word.partition("=")[::2] for word in args.only) or dict.fromkeys(makers, "")
    if unknown := sorted(names.keys() - makers.keys()):
        print(f"error: --only {unknown[0]}: give one of {', '.join(makers)}", file=sys.stderr)
        return 2
    experiments = [makers[name]() for name in names]
    report = Report(args.seed)
    file = root / "report.json"
    if args.case is not None:
        outcome = experiments[0].case(args.case)
        print(outcome)
        return int(outcome is not None and outcome.verdict.is_finding)
    counts = {e.name: int(names[e.name] or (SMALL[e.name] if args.small else e.cases)) for e in experiments}
    print(", ".join(f"{name}: {count} cases" for name, count in counts.items()), flush=True)
    run_experiments(experiments, report, started + 60 * args.minutes, file, counts=counts, first=args.first)
    print(report.table())
    for row, kinds in report.reasons.items():
        print(f"{row}: other input: " + ", ".join(f"{count} {reason}" for reason, count in kinds.items()))
    for finding in report.findings:
        print(f"{finding['kind']}: {finding['case']}: {finding['detail']}\n    {finding['again']}")
    if args.out is not None:
        print(f"report: {file}")
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
