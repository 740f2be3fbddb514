#!/usr/bin/env bash
# Disturbs mkd at random: signals, full disks, damaged files, random flags. Not part of the test suite, apart from --small.
#
#   bash tests/chaos/run.sh --minutes 30 --seed 7
#
# Every outcome must be bit-equal to an undisturbed run or refused in one line. Prints a table; --help lists the flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -n "${MKD_CHAOS_PYTHON:-}" ]] || bash tools/setup_env.sh
python="${MKD_CHAOS_PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS=1 MKD_DEVICE=cpu TRITON_INTERPRET=1 PYTHONPATH="$PWD" HF_HUB_OFFLINE=1
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT
# Without a C compiler the experiments that need the library are left out, which is printed.
if cc="$(command -v cc || command -v gcc)"; then
    "$cc" -shared -fPIC -O1 -o "$build/faults.so" tests/chaos/faults.c -ldl
    LD_PRELOAD="$build/faults.so" "$python" -m tests.chaos "$@"
else
    "$python" -m tests.chaos "$@"
fi
