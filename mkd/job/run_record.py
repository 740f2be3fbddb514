"""The record of a job in --save: run.yaml and kd_config.json.

run.yaml holds the flags, with which --kd-config repeats the job, and where it ran; kd_config.json the resolved
settings and the plan. Both are those of the latest job that did a step. A folder's first job writes them at its start;
a later one writes run-1.yaml and kd_config-1.json, or the next free number, and exchanges them with run.yaml and
kd_config.json after its first step. No passwords or keys are written to run.yaml: flags and variables whose names or
values look like ones are left out and listed.
"""

import json
import os
import re
import socket
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mkd
from mkd import cpu
from mkd.checkpoint.adapters.peft_folder import open_hf_folder
from mkd.checkpoint.hf.folder import store_assets
from mkd.config.command_words import given_flags
from mkd.config.flags import flag_parser
from mkd.config.megatron.data_args import data_prefixes
from mkd.config.run_file import FLAG, RECORD, to_yaml
from mkd.data.sources.stores import chat_files, is_chat_file
from mkd.errors import MkdError
from mkd.job.job import Job
from mkd.job.plan.plan import plan
from mkd.utils.atomic_files import replacing
from mkd.utils.commit import commit_of
from mkd.utils.logging import logger

FILE, SETTINGS = "run.yaml", "kd_config.json"
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


class RunRecord:
    """The record of a job, which becomes that of the run with the job's first step."""

    def __init__(self, folder: Path, texts: Mapping[str, str], number: int | None) -> None:
        """Args:
        folder: that of --save.
        texts: file name -> content.
        number: number of the files, which are written; None: they have none.
        """
        self._folder, self._texts, self._number = folder, dict(texts), number

    @classmethod
    def write(cls, folder: Path, texts: Mapping[str, str]) -> "RunRecord":
        """Write the files of a record: under a free number if the folder has a record, else under their names."""
        has_record = any((folder / name).is_file() for name in texts)
        record = cls(folder, texts, _free_number(folder, texts) if has_record else None)
        for name, text in texts.items():
            _write(folder / _numbered(name, record._number), text)
        return record

    def exchange(self) -> None:
        """Make this record the run's, and keep the one before under this record's number. Called after each step; only
        the first call has an effect.

        A job that is killed meanwhile leaves both records, one of them twice.
        """
        number, self._number = self._number, None
        if number is None:
            return
        try:
            spare = _free_number(self._folder, self._texts)
            before = {name: (self._folder / name).read_text("utf-8", "replace") for name in self._present()}
            for name, text in before.items():
                _write(self._folder / _numbered(name, spare), text)
            for name, text in self._texts.items():
                _write(self._folder / name, text)
            for name in self._texts:
                if name in before:
                    _write(self._folder / _numbered(name, number), before[name])
                    (self._folder / _numbered(name, spare)).unlink()
                else:
                    (self._folder / _numbered(name, number)).unlink()
        except (OSError, MkdError) as error:
            logger.warning(
                f"{self._folder / FILE} is possibly not that of this job ({error}): see {_numbered(FILE, number)}"
            )

    def _present(self) -> list[str]:
        return [name for name in self._texts if (self._folder / name).is_file()]


def _free_number(folder: Path, names: Iterable[str]) -> int:
    """The lowest number under which a folder has no record with these files."""
    return next(n for n in range(1, 1 << 20) if not any((folder / _numbered(name, n)).exists() for name in names))


def _numbered(name: str, number: int | None) -> str:
    """The name of a file of a record with a number, such as run-1.yaml."""
    path = Path(name)
    return name if number is None else f"{path.stem}-{number}{path.suffix}"


def _write(path: Path, text: str) -> None:
    with replacing(path) as out:
        out.write(text)


def run_file(args: Namespace, teacher: str | None) -> str:
    """The content of run.yaml.

    Args:
        args: Megatron's arguments, complete.
        teacher: the teacher's fingerprint; None without a teacher.
    """
    given = given_flags(sys.argv[1:], flag_parser())
    given.pop(FLAG.removeprefix("--"), None)
    flags, left_out = without_secrets(given)
    facts = {**about(args), "teacher": teacher, "left_out": left_out}
    content = {"flags": flags, RECORD: {name: fact for name, fact in facts.items() if fact not in (None, [], {})}}
    return f"# Repeats the run, from this directory and on as many ranks: {REPEAT}\n{to_yaml(content)}"


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


def write_run_record(job: Job) -> RunRecord | None:
    """Write the files beside the checkpoints that explain them and that an export needs.

    run.yaml repeats the run; kd_config.json has the resolved distillation settings and the plan; the student's Hugging
    Face configuration and tokenizer go along, so that mkd convert needs no other folder.

    Returns:
        The first two, on rank 0 of a job with --save; else None.
    """
    if job.args.rank != 0 or job.args.save is None:
        return None
    folder = Path(job.args.save)
    folder.mkdir(parents=True, exist_ok=True)
    if job.kd.student_hf is not None:
        store_assets(open_hf_folder(job.kd.student_hf, "--kd-student-hf"), folder)
    settings = json.dumps({"kd": asdict(job.kd), "plan": plan(job)}, indent=2) + "\n"
    return RunRecord.write(folder, {SETTINGS: settings, FILE: run_file(job.args, job.state.teacher_fingerprint)})
