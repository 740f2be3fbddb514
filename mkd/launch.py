"""What a process knows about the job that it is a rank of: the environment variables that launchers set."""

import os
import socket
from collections.abc import MutableMapping

from mkd.errors import MkdConfigError

TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many processes srun or mpirun has started. Neither says so in WORLD_SIZE."""


def be_a_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let a process that no launcher started be the only rank of its job.

    Args:
        environ: is given what it lacks of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        MkdConfigError: it is one of several processes, and does not know which.
    """
    ranks = int(environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and "RANK" not in environ:
        raise MkdConfigError(f"WORLD_SIZE is {ranks}, but RANK is not set: every process would be the first")
    for name in TASKS if "WORLD_SIZE" not in environ else ():
        if int(environ.get(name, "1")) > 1:
            raise MkdConfigError(
                f"{name} is {environ[name]}, but WORLD_SIZE is not set: each of these processes would train alone. "
                "Start them through examples/slurm/rank.sh, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT"
            )
    if ranks == 1:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(_free_port())}.items():
            environ.setdefault(name, value)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
