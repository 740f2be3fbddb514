"""Check of --kd-epochs; the iterations follow when the rows of the data are counted (`mkd.job.epochs`)."""

from argparse import Namespace

from mkd.errors import MkdConfigError

UNKNOWN_ITERATIONS = 1 << 40
"""Value of --train-iters until the rows of the data are counted, with --kd-epochs."""


def iterations_are_unknown(args: Namespace) -> bool:
    """True until `mkd.job.epochs` has set --train-iters from --kd-epochs."""
    return args.train_iters == UNKNOWN_ITERATIONS


def adopt_epochs(args: Namespace, epochs: float | None) -> None:
    """Refuse --kd-epochs together with another length of the run, and where iterations do not follow from it. Sets
    `train_iters` to UNKNOWN_ITERATIONS, also for the second of these, so that the length does not count as missing."""
    if epochs is None or iterations_are_unknown(args):
        return
    for flag in ("--train-iters", "--train-samples"):
        if (value := getattr(args, flag.removeprefix("--").replace("-", "_"))) is not None:
            raise MkdConfigError(f"{flag} {value} and --kd-epochs {epochs:g} both set the length of the run: give one")
    args.train_iters = UNKNOWN_ITERATIONS
    if args.mock_data:
        raise MkdConfigError(f"--kd-epochs is {epochs:g}, but --mock-data has no end: give --train-iters")
    if args.step_batch_size_schedule is not None:
        raise MkdConfigError(
            f"--kd-epochs {epochs:g} does not work with --step-batch-size-schedule {args.step_batch_size_schedule}: "
            "give --train-samples"
        )
    if args.global_batch_size is None:
        raise MkdConfigError(f"--kd-epochs {epochs:g} needs --global-batch-size (rows of an iteration)")
