"""The profile of a microbatch counts files and transitions, and finds those of a real step."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from profile_microbatch import Call, report, transitions  # noqa: E402

from tests.support.e2e.small_job import run  # noqa: E402

CALLS = [Call("a.py", "f"), Call("a.py", "g"), Call("b.py", "h"), Call("a.py", "g"), Call("c.py", "k")]


def test_transitions_are_changes_of_the_file() -> None:
    assert transitions(CALLS) == [CALLS[2], CALLS[3], CALLS[4]]
    assert report(CALLS).splitlines()[0] == "> a.py: f, g"
    assert report(CALLS).endswith("\n3 files, 3 transitions, 1 of them returns")


def test_a_real_step_is_profiled() -> None:
    done = run([], script=ROOT / "benchmarks" / "profile_microbatch.py")
    assert done.status == 0, done.errors
    files, changes, returns = map(int, re.search(r"(\d+) files, (\d+) transitions, (\d+)", done.output).groups())
    assert changes == files - 1 + returns
    assert files <= 12 and changes <= 40, "a microbatch must be readable in a handful of files"
    assert {"train/step.py", "teacher/online.py", "losses/fused_linear.py"} <= set(
        re.findall(r"\S+\.py$", done.output, re.M)
    )
