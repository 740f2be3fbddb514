"""Environment variables of a rank, as launchers set them."""

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping

from mkd.errors import MkdConfigError

TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Number of processes that srun or mpirun has started; neither sets WORLD_SIZE."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable of CUDA: hardware queues of a device."""
_OTHER_CONNECTIONS = {"--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm"}
"""Flags with which Megatron requires or recommends more than one queue."""


def default_connections(
    sizes: Iterable[str | None], words: Iterable[str], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set one hardware queue under tensor and context parallelism, which Megatron requires before Blackwell, unless the
    variable is set. Must run before CUDA is initialized.

    Args:
        sizes: values of the flags of tensor- and context-parallel sizes; None where a flag is not given.
        words: the job's command line.
        environ: of this process.
    """
    is_parallel = any(size not in (None, "1") for size in sizes)
    if is_parallel and not _OTHER_CONNECTIONS.intersection(words):
        environ.setdefault(CONNECTIONS, "1")


def default_rank_env(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make a process without a launcher the only rank of its job.

    Args:
        environ: missing values of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are added.

    Raises:
        MkdConfigError: it is one of several processes and its rank is not set, or a variable is not a valid rank or
            size.
    """
    ranks = _number(environ, "WORLD_SIZE", 1)
    _number(environ, "LOCAL_RANK", 0)
    if ranks > 1 and "RANK" not in environ:
        raise MkdConfigError(f"WORLD_SIZE is {ranks}, but RANK is not set: every process would be rank 0")
    if (rank := _number(environ, "RANK", 0)) >= ranks:
        raise MkdConfigError(f"RANK is {rank}, but WORLD_SIZE is {ranks}: ranks count from 0")
    for name in TASKS if "WORLD_SIZE" not in environ else ():
        if _number(environ, name, 1) > 1:
            raise MkdConfigError(
                f"{name} is {environ[name]}, but WORLD_SIZE is not set: each of these processes would train "
                "independently. Start them through examples/slurm/rank.sh, or set RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT"
            )
    if ranks == 1:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(_free_port())}.items():
            environ.setdefault(name, value)


def check_rendezvous(environ: Mapping[str, str] = os.environ) -> None:
    """Check the address at which the ranks connect.

    Raises:
        MkdConfigError: MASTER_ADDR or MASTER_PORT is missing, or the port is invalid.
    """
    for name, what in (("MASTER_ADDR", "the host name of the first rank's node"), ("MASTER_PORT", "a free port there")):
        if not environ.get(name):
            raise MkdConfigError(f"WORLD_SIZE is {environ.get('WORLD_SIZE')}, but {name} is not set: {what}")
    if not 0 < _number(environ, "MASTER_PORT", 0) < 2**16:
        raise MkdConfigError(f"MASTER_PORT is {environ['MASTER_PORT']}; a port is 1 to 65535")


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise MkdConfigError(f"{name} is {text!r} in the environment; it must be a number")
    return int(text)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
