"""mkd/cli/job_process.py: errors that end a rank in one line."""

import pytest
import torch

from mkd.cli.job_process import exit_status_of_rank


@pytest.mark.parametrize("size", [2**60, 2**50])
def test_host_memory_that_does_not_exist(size: int, capsys: pytest.CaptureFixture) -> None:
    """Such an allocation is that of attention over a million tokens on a CPU."""
    assert exit_status_of_rank(lambda: torch.empty(size, dtype=torch.uint8, device="cpu")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: no host memory is left" in line and "--seq-length" in line


def test_other_faults_have_a_traceback() -> None:
    def fail() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        exit_status_of_rank(fail)
