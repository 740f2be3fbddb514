"""Installed and missing packages, the cost of missing ones, and how to install them.

Imports nothing at the top that may itself be missing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

GIB = 2**30
LEAST_PYTHON = (3, 12)
IMPORT_SECONDS = 120


@dataclass(frozen=True)
class Part:
    """One part of an environment."""

    name: str
    found: str | None
    """Version or size; None if missing."""
    trouble: str | None = None
    """The fault of the installed part, or the cost of a missing one; None without trouble."""
    remedy: str = ""
    """Remedy for the trouble."""
    needed: bool = False
    """True if nothing can be trained in this state."""


@dataclass(frozen=True)
class Card:
    """A GPU as the driver reports it."""

    name: str
    gib: float
    driver: str
    capability: tuple[int, int] | None = None
    """Compute capability; None if the driver does not report it."""


def inspect() -> list[Part]:
    """All parts, in the order of the report. Takes seconds if Transformer Engine is installed, which is imported."""
    return [
        _python(),
        *(_required(name, module) for name, module in REQUIRED.items()),
        *_gpus(),
        transformer_engine(),
        apex(),
        *(_optional(name, *about) for name, about in OPTIONAL.items()),
        _memory(),
        _disk(),
    ]


REQUIRED = {
    "torch": "torch",
    "megatron-core": "megatron",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "einops": "einops",
    "omegaconf": "omegaconf",
    "sentencepiece": "sentencepiece",
}
"""Distribution -> its module."""

OPTIONAL: dict[str, tuple[str, str, str]] = {
    "flash-attn": (
        "flash_attn",
        "Transformer Engine takes cuDNN's attention instead",
        "pip install flash-attn --no-build-isolation",
    ),
    "triton": ("triton", "the loss runs in plain PyTorch, slower and with more memory", "pip install triton"),
    "flash-linear-attention": (
        "fla",
        "gated delta nets (Qwen3-Next, Qwen3.5) run in plain PyTorch, slower",
        "pip install flash-linear-attention",
    ),
    "tensorboard": ("tensorboard", "no --tensorboard-dir", "pip install tensorboard"),
    "wandb": ("wandb", "no --wandb-project", "pip install wandb"),
    "mlflow": ("mlflow", "no MLflow tracking", "pip install mlflow"),
    "nvidia-resiliency-ext": (
        "nvidia_resiliency_ext",
        "--async-save needs --async-strategy mcore",
        "pip install nvidia-resiliency-ext",
    ),
}
"""Distribution -> (module, what is missing without it, how to install it)."""


def version(distribution: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cards() -> list[Card]:
    """GPUs of this machine; empty without a driver."""
    fields = "name,memory.total,driver_version"
    rows = _query_cards(f"{fields},compute_cap") or _query_cards(fields)  # old drivers refuse the last one
    return [Card(row[0], float(row[1]) / 1024, row[2], _capability(*row[3:])) for row in rows if len(row) in (3, 4)]


def lowest_capability(cards: Sequence[Card]) -> tuple[int, int] | None:
    """The lowest compute capability of some cards; None if one is unknown, or without cards."""
    found = [card.capability for card in cards]
    return min(found) if found and None not in found else None


def _query_cards(fields: str) -> list[list[str]]:
    """Values of nvidia-smi's fields for every GPU; empty if it fails."""
    try:
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _capability(text: str = "") -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _python() -> Part:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= LEAST_PYTHON:
        return Part("Python", found)
    return Part("Python", found, "mkd needs 3.12 or newer", "install a newer Python", needed=True)


def _required(name: str, module: str) -> Part:
    found, remedy = version(name), "pip install . (in mkd's checkout)"
    if found is None and find_spec(module) is None:
        return Part(name, None, "mkd cannot run", remedy, needed=True)
    if name == "megatron-core" and found is not None and not found.startswith("0.19."):
        return Part(name, found, "mkd is written for 0.19", "pip install 'megatron-core==0.19.*'", needed=True)
    return Part(name, found or "version unknown")


def _gpus() -> list[Part]:
    """Checks the driver, the GPUs, and torch's access to them."""
    found = cards()
    if not found:
        cost = "jobs run on CPU, for small models only; mkd doctor checks jobs for GPUs all the same"
        return [Part("GPU", None, cost, "run on a machine with an NVIDIA GPU and driver")]
    kinds = {card.name for card in found}
    text = f"{len(found)} x {', '.join(sorted(kinds))}, {min(card.gib for card in found):.1f} GiB"
    parts = [Part("driver", found[0].driver), Part("GPU", text)]
    if find_spec("torch") is None:
        return parts
    import torch

    if torch.version.cuda is None:
        trouble = "torch is a build without CUDA: jobs run on CPU"
        return [*parts, Part("CUDA of torch", None, trouble, "install torch from pytorch.org's CUDA builds")]
    if not torch.cuda.is_available():
        trouble = f"torch finds no GPU: driver {found[0].driver} may be too old for it, or the GPUs are hidden"
        remedy = "a newer driver, or a torch for an older CUDA; see CUDA_VISIBLE_DEVICES"
        return [*parts, Part("CUDA of torch", torch.version.cuda, trouble, remedy)]
    return [*parts, Part("CUDA of torch", torch.version.cuda)]


def transformer_engine() -> Part:
    """Transformer Engine, imported in a process of its own: loading its libraries is what fails."""
    name, install = "transformer-engine", "pip install 'transformer-engine[pytorch]', or an NGC PyTorch container"
    if find_spec("transformer_engine") is None:
        cost = "on GPUs only --transformer-impl local: slower, and neither packed rows, context parallelism nor fp8"
        return Part(name, None, cost, install)
    found = version(name) or version("transformer_engine") or "version unknown"
    try:
        command = [sys.executable, "-c", "import transformer_engine.pytorch"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
        reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"the import took more than {IMPORT_SECONDS} s"
    if reason:
        return Part(name, found, f"it cannot be imported: {reason}", f"reinstall it: {install}")
    return Part(name, found)


def apex() -> Part:
    """NVIDIA Apex; PyPI's project of that name is an unrelated package."""
    cost = "weight gradients are added up in a second pass (--no-gradient-accumulation-fusion, which mkd sets itself)"
    remedy = "build it from https://github.com/NVIDIA/apex; Transformer Engine has the other fused kernels"
    if has_wrong_apex():
        return Part(
            "apex",
            version("apex") or "version unknown",
            f"this is PyPI's project apex, not NVIDIA Apex; {cost}",
            f"pip uninstall apex, then {remedy}",
        )
    if find_spec("apex") is None:
        return Part("apex (NVIDIA)", None, cost, remedy)
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        return Part("apex (NVIDIA)", "without its CUDA extensions", cost, f"{remedy}, with --cuda_ext")
    return Part("apex (NVIDIA)", version("apex") or "version unknown")


def has_wrong_apex() -> bool:
    """True if the module apex is not NVIDIA's, which always has a folder multi_tensor_apply."""
    spec = find_spec("apex")
    if spec is None:
        return False
    return not any((Path(folder) / "multi_tensor_apply").is_dir() for folder in spec.submodule_search_locations or ())


def _optional(name: str, module: str, cost: str, remedy: str) -> Part:
    found = version(name)
    if found is None and find_spec(module) is None:
        return Part(name, None, cost, remedy)
    return Part(name, found or "version unknown")


def _memory() -> Part:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Part("host memory", f"{total:.1f} GiB, {os.cpu_count()} CPU cores")


def _disk() -> Part:
    free = shutil.disk_usage(".").free / GIB
    if free < 1.0:
        return Part(
            "disk here", f"{free:.1f} GiB free", "checkpoints will not fit", "free disk space, or save elsewhere"
        )
    return Part("disk here", f"{free:.1f} GiB free")
