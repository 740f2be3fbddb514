"""Environment variables of a rank."""

import pytest

from mkd.distributed.rank_env import CONNECTIONS, check_rendezvous, default_connections, default_rank_env
from mkd.errors import MkdConfigError


def test_process_without_a_launcher_is_the_only_rank() -> None:
    environ = {"HOME": "/home/me"}
    default_rank_env(environ)
    assert 0 < int(environ.pop("MASTER_PORT")) < 65536
    assert environ == {
        "HOME": "/home/me",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "3", "WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"},
        {"RANK": "0", "WORLD_SIZE": "16"},  # of a dry run
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "LOCAL_RANK": "3"},
    ],
)
def test_existing_rank_is_kept(environ: dict[str, str]) -> None:
    before = dict(environ)
    default_rank_env(environ)
    assert environ == before


def test_single_slurm_task() -> None:
    environ = {"SLURM_STEP_NUM_TASKS": "1", "MASTER_PORT": "29500"}
    default_rank_env(environ)
    assert (environ["WORLD_SIZE"], environ["MASTER_PORT"]) == ("1", "29500")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS is 8, but WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '' in the environment; it must be a number"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_missing_or_invalid_rank(environ: dict[str, str], words: str) -> None:
    with pytest.raises(MkdConfigError, match=words):
        default_rank_env(environ)


def test_rendezvous() -> None:
    told = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    check_rendezvous(told)
    for name, value, words in (
        ("MASTER_ADDR", None, "WORLD_SIZE is 2, but MASTER_ADDR is not set: the host name"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set"),
        ("MASTER_PORT", None, "WORLD_SIZE is 2, but MASTER_PORT is not set: a free port"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536; a port is"),
        ("MASTER_PORT", "tcp", "MASTER_PORT is 'tcp'"),
    ):
        environ = {key: text for key, text in {**told, name: value}.items() if text is not None}
        with pytest.raises(MkdConfigError, match=words):
            check_rendezvous(environ)


@pytest.mark.parametrize(
    ("sizes", "words", "before", "after"),
    [
        (["2", None], [], None, "1"),
        ([None, "4"], ["--bf16"], None, "1"),
        (["1", None], [], None, None),
        (["2", None], [], "32", "32"),
        (["2", None], ["--use-torch-fsdp2"], None, None),
        (["2", None], ["--overlap-moe-expert-parallel-comm"], None, None),
    ],
)
def test_one_hardware_queue(sizes: list[str | None], words: list[str], before: str | None, after: str | None) -> None:
    environ = {} if before is None else {CONNECTIONS: before}
    default_connections(sizes, words, environ)
    assert environ.get(CONNECTIONS) == after
