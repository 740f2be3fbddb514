"""run.yaml in --save: the flags of a job, with which --kd-config repeats it, and where it ran.

run.yaml is that of the latest job. Each job start keeps the one before as run-1.yaml, run-2.yaml, ... No passwords or
keys are written: flags and variables whose names or values look like ones are left out and listed.
"""

import os
import re
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mkd
from mkd import cpu
from mkd.config.data_args import data_prefixes
from mkd.config.flags import flag_parser
from mkd.config.run_file import FLAG, RECORD, given_flags, to_yaml
from mkd.data.sources.stores import chat_files, is_chat_file
from mkd.utils.atomic_files import replacing
from mkd.utils.commit import commit_of

FILE = "run.yaml"
REPEAT = f"mkd train {FLAG} {FILE} --save NEW --load NEW"
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "triton", "numpy", "tokenizers")
VARIABLES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "MKD_", "MKL_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_", "TRITON_"),
    *("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
)
"""Beginnings of the names of environment variables that can change a run."""
SECRET_NAMES = re.compile(r"secret|passw|passphrase|credential|([-_]|^)(key|token|auth)$", re.IGNORECASE)
SECRET_VALUES = re.compile(
    r"://[^/\s]*@"  # URL with a user
    r"|[?&;][^=&;\s]*(key|token|secret|passw|sig|auth)[^=&;\s]*="  # URL with a key
    r"|\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}"  # keys of well-known services
    r"|^[0-9a-f]{40}$",  # keys of Weights & Biases
    re.IGNORECASE,
)
MOST_HASHED = 64
"""Files whose content is hashed; of further ones only the size is recorded."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def write_run_file(args: Namespace, teacher: str | None, folder: Path) -> None:
    """Write run.yaml into a folder, and keep the one that is there under a free name.

    Args:
        args: Megatron's arguments, complete.
        teacher: the teacher's fingerprint; None without a teacher.
        folder: that of --save.
    """
    file = folder / FILE
    if file.is_file():
        kept = next(path for n in range(1, 1 << 20) if not (path := folder / f"run-{n}.yaml").exists())
        with replacing(kept) as out:
            out.write(file.read_text(encoding="utf-8", errors="replace"))
    given = given_flags(sys.argv[1:], flag_parser())
    given.pop(FLAG.removeprefix("--"), None)
    flags, left_out = without_secrets(given)
    facts = {**about(args), "teacher": teacher, "left_out": left_out}
    content = {"flags": flags, RECORD: {name: fact for name, fact in facts.items() if fact not in (None, [], {})}}
    with replacing(file) as out:
        out.write(f"# Repeats the run, from this directory and on as many ranks: {REPEAT}\n{to_yaml(content)}")


def about(args: Namespace) -> dict[str, Any]:
    """Where, when and with which versions a job runs, and the state of its data."""
    has_gpu = torch.cuda.is_available() and not cpu.is_active()
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "mkd": mkd.__version__,
        "commit": commit_of(Path(mkd.__file__).parent),
        "source": source_hash(Path(mkd.__file__).parent),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "directory": os.getcwd(),
        "program": Path(sys.argv[0]).name,
        "ranks": args.world_size,
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)),
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "versions": versions(),
        "environment": without_secrets(variables)[0],
        "data": data_states(data_prefixes(args)),
    }


def versions() -> dict[str, str]:
    """Versions of Python, CUDA and of the packages that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def source_hash(package: Path) -> str:
    """128-bit hash of the Python files of a package: equal for equal code, in a checkout or installed."""
    digest = blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def without_secrets(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values without passwords and keys, and the names that are left out."""
    kept = {name: value for name, value in values.items() if not _is_secret(name, value)}
    return kept, [name for name in values if name not in kept]


def _is_secret(name: str, value: bool | str | list[str]) -> bool:
    if SECRET_NAMES.search(name):
        return True
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and SECRET_VALUES.search(text) for text in texts)


def data_states(names: list[str]) -> dict[str, str]:
    """Size and hash of each file that the data flags name: of both files of a PREFIX, of all files of a folder or
    glob."""
    files: list[Path] = []
    for name in dict.fromkeys(names):
        found = chat_files(name) if is_chat_file(name) else [name, f"{name}.bin", f"{name}.idx"]
        files += [path for path in map(Path, found) if path.is_file()]
    return {str(path): data_state(path, hashed=number < MOST_HASHED) for number, path in enumerate(files)}


def data_state(path: Path, hashed: bool = True) -> str:
    """Size of a file, and a 128-bit hash of blocks spread over it: at most 1 MiB is read."""
    size = path.stat().st_size
    if not hashed:
        return f"{size} bytes"
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, hash {digest.hexdigest()}"
