"""tests/support/gpu/rank_server.py on CPU: the jobs of GPU tests end as under torchrun."""

from pathlib import Path

import pytest

from tests.support.gpu.rank_server import TIMED_OUT, RankServer

SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "with", os.environ["WORD"], flush=True)
if sys.argv[1] == "fails":
    sys.exit(3) if rank == "1" else time.sleep(60)
if sys.argv[1] == "raises":
    raise ValueError("of rank " + rank)
if sys.argv[1] == "waits":
    time.sleep(60)
"""


@pytest.mark.slow
def test_ends_of_jobs(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    server = RankServer(MKD_DEVICE="cpu", WORD="first")

    def run(end: str, ranks: int, timeout: float = 100.0) -> tuple[int, str]:
        return server.run([str(script), end], log, ranks, timeout, WORD="second")

    status, output = run("well", 2)
    assert status == 0
    assert sorted(output.splitlines()) == ["rank 0 of 2 with second", "rank 1 of 2 with second"]
    assert run("fails", 2)[0] == 3
    status, output = run("raises", 1)
    assert status == 1
    assert "ValueError: of rank 0" in output
    assert run("waits", 2, timeout=1.0)[0] == TIMED_OUT
