"""tools/cache_teacher.py as a job that loses its machine, or is asked to leave it: see tests/e2e/killer.py, whose
MKD_TEST_KILL and MKD_TEST_KILL_RANK it takes. Every microbatch is a shard of its own.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkd.caching import storing
from tests.e2e.killer import die_at
from tools import cache_teacher

if __name__ == "__main__":
    os.setsid()  # so that all processes of this job can be killed together
    storing.FLUSH_SECONDS = 0.0
    if "MKD_TEST_KILL" in os.environ and os.environ["RANK"] == os.environ.get("MKD_TEST_KILL_RANK", "0"):
        event, number, *warning = os.environ["MKD_TEST_KILL"].split(":")
        die_at(event, int(number), *warning)
    cache_teacher.main()
