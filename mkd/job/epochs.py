"""The length of a run in epochs (--kd-epochs): iterations from the number of training rows."""

import math
from argparse import Namespace

from mkd.checkpoint.megatron.resume_point import ResumePoint
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.optimizer import check_learning_rate
from mkd.config.megatron.epochs import iterations_are_unknown
from mkd.job.data import JobData
from mkd.job.resume.optimizer import check_stored_schedule
from mkd.utils.logging import logger


def set_iterations(args: Namespace, kd: KDConfig, data: JobData, point: ResumePoint | None) -> None:
    """Set `args.train_iters` from --kd-epochs, and make the checks that depend on it. Does nothing if it is known.

    Collective over all ranks if torch.distributed is initialized and rows are made of whole samples: rank 0 tokenizes.

    Raises:
        MkdConfigError: the schedule of the learning rate does not fit, or is not the checkpoint's.
        MkdDataError: the data cannot be read.
    """
    if not iterations_are_unknown(args):
        return
    rows, batch = data.rows_per_epoch(), args.global_batch_size
    args.train_iters = iterations_of(kd.epochs, rows, batch)
    more = args.train_iters * batch - kd.epochs * rows
    about = "" if data.has_own_rows else "about "
    rest = f", which read {more:,.0f} more" if more >= 0.5 else ""
    count = f"{args.train_iters:,} iteration" + "s" * (args.train_iters > 1)
    logger.info(f"epochs     {kd.epochs:g} of {about}{rows:,} rows are {count} of {batch} rows{rest}")
    check_learning_rate(args)
    for note in check_stored_schedule(args, point):
        logger.info(f"changed    {note}")


def iterations_of(epochs: float, rows: int, batch: int) -> int:
    """The fewest iterations of `batch` rows that read `epochs` epochs of `rows` rows."""
    return max(1, math.ceil(round(epochs * rows, 6) / batch))
