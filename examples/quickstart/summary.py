"""Table of the validation perplexities of the two training runs of the quickstart.

python examples/quickstart/summary.py --kd runs/quickstart/kd/metrics.jsonl --ce runs/quickstart/ce/metrics.jsonl
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkd.errors import MkdDataError, MkdError
from mkd.report.console import evaluation_table, perplexity, show
from mkd.report.run_log import RunLog


def cross_entropies(kd: RunLog, ce: RunLog) -> dict[str, float]:
    """Model -> validation cross-entropy in nats per token; raises MkdDataError if a value is missing in the metrics."""
    found = {
        "teacher": kd.last("valid_teacher_ce"),
        "student before": kd.first("valid_ce"),
        "student after, with the teacher": kd.last("valid_ce"),
        "student after the same steps, R = 0": ce.last("valid_ce"),
    }
    missing = [model for model, value in found.items() if value is None]
    if missing:
        raise MkdDataError(
            f"{kd.path} and {ce.path} do not contain the validation cross-entropy of: {', '.join(missing)}"
        )
    return found


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kd", required=True, metavar="FILE", help="metrics of the training with the teacher")
    parser.add_argument("--ce", required=True, metavar="FILE", help="metrics of the training with R = 0")
    args = parser.parse_args()
    try:
        found = cross_entropies(RunLog.read(args.kd), RunLog.read(args.ce))
    except MkdError as error:
        print(f"summary: {error}", file=sys.stderr)
        return 1
    show("validation on held-out text", evaluation_table({m: {"ce": ce} for m, ce in found.items()}))
    _, before, with_teacher, without = found.values()
    change = perplexity(with_teacher - without) - 1
    side = "below" if change < 0 else "above"
    print(
        f"Perplexity with the teacher: {perplexity(before):,.1f} before training, "
        f"{perplexity(with_teacher):,.1f} after, {abs(change):.0%} {side} the same steps without the teacher."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
