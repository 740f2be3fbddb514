"""pretrain_kd.py on a disk that is full when the second checkpoint is written."""

# ruff: noqa: E402 - the CPU backend must be in place before megatron is imported

import errno
import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkd import cpu

cpu.activate()

from megatron.core.dist_checkpointing.strategies import filesystem_async

import pretrain_kd

if __name__ == "__main__":
    write = filesystem_async._write_item

    @functools.wraps(write)  # megatron looks at signatures
    def write_or_fail(*args: Any, **kwargs: Any) -> Any:
        if any("iter_0000002" in str(getattr(value, "name", "")) for value in args):  # the open file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args, **kwargs)

    filesystem_async._write_item = write_or_fail
    pretrain_kd.run()
