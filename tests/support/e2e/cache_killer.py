"""tools/cache_teacher.py as a job that loses its machine, or is asked to leave it. It takes MKD_TEST_KILL and
MKD_TEST_KILL_RANK as tests/support/e2e/killer.py does. Every microbatch is a shard of its own.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mkd.cache_build import writer_thread as storing
from tests.support.e2e.killer import die_at
from tools import cache_teacher

if __name__ == "__main__":
    os.setsid()  # so that all processes of this job can be killed together
    storing.FLUSH_SECONDS = 0.0
    if "MKD_TEST_KILL" in os.environ and os.environ["RANK"] == os.environ.get("MKD_TEST_KILL_RANK", "0"):
        event, number, *warning = os.environ["MKD_TEST_KILL"].split(":")
        die_at(event, int(number), *warning)
    cache_teacher.main()
