"""torchrun's report of a failed rank, the last lines of a job's output, repeats the error of that rank.

torchrun prints about 30 lines after the error that ends a rank, its own traceback among them. The last of them has the
error if the rank writes it to the file in ERROR_FILE, in the format of `torch.distributed.elastic`'s `record`.

examples/slurm/train.sbatch names one file for all ranks of an attempt: with an error of the configuration in it, the
job is not requeued. The exit status of a step does not show that, because srun kills the ranks that report later.
"""

import json
import os
import time
from contextlib import suppress

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that torchrun sets for each of its ranks."""
_LONGEST = 2_000
"""Characters of a repeated message at most."""


def report_to_torchrun(message: str, is_configuration: bool = False) -> None:
    """Write the error that ends this rank for torchrun's report; without torchrun nothing is written.

    Of ranks with errors in the same second torchrun reports the lowest one as the root cause, even if it has ended that
    rank itself. The time is therefore a second earlier.

    Args:
        message: the error.
        is_configuration: the flags or the environment are wrong on every node: another attempt would end in the same
            way.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    shown = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
    error = {"message": shown, "extraInfo": {"timestamp": str(int(time.time()) - 1)}}
    with suppress(OSError), open(path, "x", encoding="utf-8") as file:  # an earlier error is the cause of this one
        json.dump({"message": error, "is_configuration": is_configuration}, file)
