"""tools/cache_teacher.py as a job that is killed, or stopped by a signal. Reads MKD_TEST_KILL and MKD_TEST_KILL_RANK
like tests/support/e2e/killer.py. Every microbatch becomes a shard.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mkd.cli import cache
from mkd.job.cache_build import writer_thread
from tests.support.e2e.killer import die_at

if __name__ == "__main__":
    os.setsid()  # so that all processes of this job can be killed together
    writer_thread.FLUSH_SECONDS = 0.0
    if "MKD_TEST_KILL" in os.environ and os.environ["RANK"] == os.environ.get("MKD_TEST_KILL_RANK", "0"):
        event, number, *warning = os.environ["MKD_TEST_KILL"].split(":")
        die_at(event, int(number), *warning)
    cache.run(sys.argv[1:])
