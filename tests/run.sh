#!/usr/bin/env bash
# Runs all tests that need no GPU, two files of tests at a time. Arguments go to pytest, which then runs one after the
# other, for example: bash tests/run.sh tests/unit -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH"
# Tests start up to 8 processes: more than one thread in each would only make them wait for one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if (($# == 0)); then
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder # folders of long tests come first
fi
exec python -m pytest -m "not gpu and not slow and not served" "$@"
