"""Imports without Python's garbage collector: mkd/utils/collector.py, and that the ranks of a job use it."""

import gc
import subprocess
import sys

import pytest

from mkd.utils.collector import uncollected
from tests.support.e2e.small_job import ROOT, environment


def test_objects_made_inside_are_left_out_of_later_collections() -> None:
    with uncollected():
        assert not gc.isenabled()
        kept = {"a": [1]}
    assert gc.isenabled()
    assert not any(one is kept for one in gc.get_objects())
    later = {"b": [2]}
    assert any(one is later for one in gc.get_objects())


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="refused"), uncollected():
        raise ValueError("refused")
    assert gc.isenabled()


RANK = """
import gc
from mkd.cli.job_process import prepare
prepare([])
import megatron.training
print(gc.isenabled(), gc.get_freeze_count() > 100_000, gc.get_stats()[2]["collections"])
"""


def test_a_rank_imports_megatron_without_a_full_collection() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "0"], done.stderr
