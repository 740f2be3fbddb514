"""pretrain_kd.py as a job whose signal arrives at a known point: rank 0 waits in one of its forward steps for it.

STAND_IN_SIGNALS is JSON: number of the attempt -> [forward step of the process, signal]. In this step the file
STAND_IN_HELD is written, at which tests/e2e/slurm/srun.py sends the signal to all tasks.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from mkd.compat.stopping import StopSignals  # noqa: E402
from mkd.train.step import ForwardStep  # noqa: E402


def hold_in(step: int, held: Path, limit_s: float = 60.0) -> None:
    """Wait in the `step`-th forward step until a signal is recorded."""
    forward, record = ForwardStep.__call__, StopSignals._record
    steps, received = 0, False

    def recorded(*args: Any) -> None:
        nonlocal received
        received = True
        record(*args)

    def held_forward(*args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == step:
            held.touch()
            deadline = time.monotonic() + limit_s
            while not received:
                assert time.monotonic() < deadline, f"no signal within {limit_s:g} s"
                time.sleep(0.01)
        return forward(*args, **options)

    StopSignals._record, ForwardStep.__call__ = recorded, held_forward


if __name__ == "__main__":
    plan = json.loads(os.environ["STAND_IN_SIGNALS"]).get(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if plan is not None and os.environ["RANK"] == "0":
        hold_in(plan[0], Path(os.environ["STAND_IN_HELD"]))
    sys.argv[0] = str(ROOT / "pretrain_kd.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
