"""A process that runs a job of Megatron: its preparation, and its exit status."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mkd.cli.launched import end_with_launcher
from mkd.cli.torchrun_report import report_to_torchrun
from mkd.config.flag_checks import check_kd_names
from mkd.errors import MkdConfigError, MkdError, MkdNodeError, MkdTeacherTimeout
from mkd.utils.collector import uncollected
from mkd.utils.logging import FILE_ONLY, logger

_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Part of torch's message."""
_ONE_CONNECTION = ("--tensor-model-parallel-size", "--context-parallel-size")
"""Flags of sizes above 1 with which Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a program that a shell runs."""


def prepare(flags: list[str]) -> None:
    """Set up the process for Megatron; `flags` become its command line, in which --kd-config may name files of flags.

    Must run before Megatron is imported, because it installs the CPU backend.

    Raises:
        MkdConfigError: a name that begins with --kd- is not that of a flag, the environment of the rank is
            inconsistent, or a file of --kd-config cannot be read.
    """
    end_with_launcher()
    check_kd_names(flags)
    with uncollected():
        from mkd import cpu
        from mkd.compat.install import install_at_start
        from mkd.config.command_words import last_value, read_settings, words_of
        from mkd.distributed.rank_env import default_connections, default_rank_env

        default_rank_env()
        words = [*words_of(read_settings(flags)), *flags]
        if cpu.wanted():
            cpu.activate()
        else:
            default_connections([last_value(words, flag) for flag in _ONE_CONNECTION], words)
        install_at_start(words)
    sys.argv[1:] = flags


def exit_status_of_rank(
    command: Callable[[], object], is_correctable: Callable[[BaseException], bool] | None = None
) -> int:
    """Run a command that all ranks of a job run; the exit status is 0, 1 after an error of the user, that
    of `MkdTeacherTimeout`, or INTERRUPTED. Errors are repeated in torchrun's report.

    Args:
        command: what to run.
        is_correctable: returns True for errors of the user among MkdError and OSError; None for all of them.
    """
    try:
        command()
    except (MkdError, OSError) as error:
        if is_correctable is not None and not is_correctable(error):
            report_to_torchrun(_last_line(error))
            raise
        # All ranks fail alike: rank 0 reports first, and torchrun ends the others while they wait.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)
        _print_error(str(error), _is_of_configuration(error))
        logger.error(traceback.format_exc() if isinstance(error, OSError) else str(error), extra=FILE_ONLY)
        return error.status if isinstance(error, MkdTeacherTimeout) else 1
    except (MemoryError, RuntimeError) as error:
        if (message := _lack_of_the_machine(error)) is None:
            report_to_torchrun(_last_line(error))
            raise
        _print_error(message)
        logger.error(traceback.format_exc(), extra=FILE_ONLY)
        return 1
    except KeyboardInterrupt:  # while there is something to complete, mkd.compat.stopping handles Ctrl-C
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: interrupted before the first step", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        report_to_torchrun(_last_line(error))
        raise
    return 0


def _lack_of_the_machine(error: BaseException) -> str | None:
    """The message if memory or the port of the rendezvous is lacking; None for other errors.

    torch's classes are recognized by their names, since a command may fail before it imports torch.
    """
    text, kind = " ".join(str(error).split()), type(error).__name__
    if isinstance(error, MemoryError) or _NO_MEMORY in text:
        return (
            f"no host memory is left ({text[-200:]}): compare the line memory of the plan with the machine, and reduce "
            "--micro-batch-size or --seq-length"
        )
    if kind == "OutOfMemoryError":
        return (
            f"no GPU memory is left on rank {os.environ.get('RANK', '0')} ({text[:200]}): compare the line memory of "
            "the plan with the GPU; a smaller --micro-batch-size or --kd-loss-chunk-rows, --kd-teacher-offload and "
            "--recompute-granularity full need less, and mkd doctor lists what each of them saves"
        )
    if kind == "DistNetworkError" and "EADDRINUSE" in text:
        return (
            f"MASTER_PORT {os.environ.get('MASTER_PORT')} is in use by another process of this machine: give another "
            "one (torchrun --master-port PORT), or end that process"
        )
    return None


def _print_error(message: str, is_configuration: bool = False) -> None:
    """Print the line that ends the job, and repeat it in torchrun's report; see `report_to_torchrun`."""
    line = f"{Path(sys.argv[0]).name}: error: {message}"
    print(line, file=sys.stderr, flush=True)
    report_to_torchrun(line, is_configuration)


def _is_of_configuration(error: BaseException) -> bool:
    """True if the flags or the environment are wrong on every node."""
    return isinstance(error, MkdConfigError) and not isinstance(error, MkdNodeError) and not _lacks_gpu()


def _lacks_gpu() -> bool:
    """True if the rank runs on the CPU because its node has no usable GPU: another node may have one.

    False before torch is imported: flags alone are wrong then.
    """
    cpu = sys.modules.get("mkd.cpu")
    return cpu is not None and cpu.is_active() and os.environ.get(cpu.DEVICE_VARIABLE, "").lower() != "cpu"


def _last_line(error: BaseException) -> str:
    """The last line of the error's traceback, which Python prints."""
    return "".join(traceback.format_exception_only(error)).strip()
