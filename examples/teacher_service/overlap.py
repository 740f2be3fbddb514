"""Print how much of a training's time is spent waiting for the teacher service, and what the student has learned.

python examples/teacher_service/overlap.py runs/teacher_service/student-served/metrics.jsonl
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkd.errors import MkdDataError, MkdError
from mkd.report.run_log import RunLog

WARMUP_STEPS = 3
"""Steps that are not counted: nothing has been requested ahead of the first."""


def shares(log: RunLog) -> tuple[int, float, float]:
    """Number of counted steps, seconds of one, and the share of it in which the student waits for the teacher.

    Raises:
        MkdDataError: the metrics have too few steps, or are not those of a served teacher.
    """
    waits, steps = (dict(zip(*log.curve(name), strict=True)) for name in ("cache_s", "step_s"))
    counted = [step for step in sorted(steps) if step > WARMUP_STEPS and step in waits]
    if not counted:
        raise MkdDataError(f"{log.path} has no step after {WARMUP_STEPS} with cache_s: is it a run with a service?")
    total = sum(steps[step] for step in counted)
    return len(counted), total / len(counted), sum(waits[step] for step in counted) / total


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", metavar="FILE", help="metrics of the student")
    args = parser.parse_args()
    try:
        log = RunLog.read(args.metrics)
        count, seconds, share = shares(log)
    except MkdError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    print(
        f"{count} steps of {seconds:.2f} s: the student waits for the teacher in {share:.0%} of the time, and computes "
        f"in {1 - share:.0%} of it while the teacher is ahead"
    )
    for name, text in ("valid_teacher_ce", "teacher"), ("valid_ce", "student"):
        values = log.first(name), log.last(name)
        if None not in values:
            print(f"validation cross-entropy, {text}: {values[0]:.3f} before, {values[1]:.3f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
