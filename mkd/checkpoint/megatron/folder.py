"""A Megatron checkpoint folder (torch_dist): its current iteration, stored arguments, index and tensors.

A folder that `--save` wrote contains one `iter_XXXXXXX` folder per checkpoint (or `release`, an imported model) and a
tracker file that names the current one. Opening a folder finds that iteration and checks its small files; tensors are
read later, one at a time.
"""

import functools
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from mkd.checkpoint.megatron.integrity import DAMAGE, changed_files, changed_index, find_damage
from mkd.checkpoint.tokenizer_hash import ASSETS, hash_hex, tokenizer_hash
from mkd.compat.unpickling import allowed_classes_only, load_object
from mkd.errors import MkdCheckpointError, MkdError
from mkd.utils.json_files import read_json, read_regular
from mkd.utils.model_folders.formats import TRACKER, hf_hint
from mkd.utils.near_paths import near_path_hint

TRACKER_BYTES = 1 << 20
"""Largest tracker that is read; one has a few digits."""
_MOST_DIGITS = 18
# Argument names of earlier Megatron versions
_OLD_NAMES = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}

_COUNTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_experts", "moe_ffn_hidden_size", "vocab_size", "padded_vocab_size", "max_position_embeddings"),
)
"""Arguments that other code computes with."""

_DAMAGE = (OSError, CheckpointingException, *DAMAGE)
"""Errors of reading a folder with damaged files."""
_OLD_COMMON = "common.pt"
"""Earlier Megatron versions stored the arguments in a file of their own."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def iteration_name(iteration: int) -> str:
    """Name of the folder of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Iteration of a folder of this name; None for `release` and for other names."""
    digits = name.removeprefix("iter_")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def tracked_folder(text: str) -> str | None:
    """The folder that the text of a tracker names; None if it names none."""
    if text == "release":
        return text
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return iteration_name(int(text)) if is_number else None


class MegatronFolder:
    """A folder that `--save` wrote, or one of its iteration folders. Construction reads no weight.

    Args:
        path: the folder.
        flag: names it in errors.
        step: --ckpt-step; with it this iteration is read, and not the one that the tracker names.

    Raises:
        MkdCheckpointError: naming `flag`, when the folder, its tracker file or the iteration that the tracker names is
            missing or damaged.
    """

    def __init__(self, path: str | os.PathLike, flag: str, step: int | None = None) -> None:
        self.path = Path(path)
        self.flag = flag
        if not self.path.is_dir():
            raise self.error(f"the folder does not exist{near_path_hint(self.path, Path.is_dir)}")
        self.iteration_dir: Path = self._resolve(step)
        self._check_iteration_dir()

    def error(self, text: str) -> MkdCheckpointError:
        """An error that names the folder and its flag."""
        return MkdCheckpointError(f"{self.flag} {self.path}: {text}")

    @property
    def assets_dir(self) -> Path | None:
        """The folder with the Hugging Face configuration and tokenizer; None when the checkpoint has none."""
        return self.save_dir / ASSETS if (self.save_dir / ASSETS).is_dir() else None

    @property
    def save_dir(self) -> Path:
        """The folder that `--save` wrote, which contains the iteration."""
        return self.path if self.iteration_dir != self.path else self.path.parent

    @functools.cached_property
    def args(self) -> Namespace:
        """Megatron's arguments of the job that wrote the checkpoint, under the names of megatron-core 0.19."""
        args = self._common.get("args")
        if not isinstance(args, Namespace):
            raise self.error(f"{self.iteration_dir.name} stores no arguments; save it with megatron.training")
        for name in _COUNTS:
            value = getattr(args, name, None)
            if value is not None and (type(value) is not int or not 0 <= value < 2**40):
                raise self.error(
                    f"{self.iteration_dir.name} stores {name} as {str(value)[:40]!r}, which is not a number"
                )
        for old, new in _OLD_NAMES.items():
            if hasattr(args, old) and not hasattr(args, new):
                setattr(args, new, getattr(args, old))
        return args

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the frozen weights if the checkpoint holds adapters alone; else None."""
        return getattr(self.args, "kd_base_fingerprint", None)

    def check_whole(self) -> None:
        """Raise `MkdCheckpointError` if the checkpoint holds adapters without the weights under them."""
        if self.base_fingerprint is not None:
            raise self.error(
                f"{self.iteration_dir.name} holds adapters (--kd-lora) without the frozen weights of "
                f"{getattr(self.args, 'kd_student_hf', None)}: mkd convert export --merge writes the whole model"
            )

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """State of megatron's scheduler of learning rate and weight decay; None if the checkpoint has none."""
        return self._common.get("opt_param_scheduler")

    @property
    def optimizer_format(self) -> str | None:
        """Megatron's name of the format of a distributed optimizer's state; None without such a state."""
        content = self._common.get("content_metadata") or {}
        return content.get("distrib_optim_sharding_type")

    @functools.cached_property
    def _common(self) -> dict[str, Any]:
        """The stored values that are not tensors and are the same on every rank."""
        _ = self.metadata
        try:
            with allowed_classes_only():
                if (old := self.iteration_dir / _OLD_COMMON).is_file():
                    return load_object(old)
                return load_common_state_dict(str(self.iteration_dir))
        except (MkdCheckpointError, *_DAMAGE) as error:
            raise self.error(f"the arguments in {self.iteration_dir.name} cannot be read ({_reason(error)})") from error

    def check_shards(self) -> None:
        """Raise `MkdCheckpointError` unless every file that the index names exists with its length."""
        _ = self.metadata  # its errors name the flag
        if (damage := find_damage(self.iteration_dir)) is not None:
            raise self.error(f"{self.iteration_dir.name} is not complete: {damage}")

    def check_content(self) -> None:
        """Raise `MkdCheckpointError` unless every file is what was saved, as far as its hash is known. Reads all."""
        self.check_shards()
        if problems := changed_files(self.iteration_dir):
            raise self.error(f"{self.iteration_dir.name} is damaged: {problems[0]}")

    def fingerprint(self) -> str:
        """128-bit hex hash of the checkpoint: its index, and the size and 64 blocks of 4 KiB of each shard file."""
        parts = [(self.iteration_dir / ".metadata").read_bytes()]
        for path in sorted(self.iteration_dir.glob("*.distcp")):
            if not path.is_file():
                raise self.error(f"{self.iteration_dir.name}/{path.name} is not a regular file")
            size = path.stat().st_size
            parts.append(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                    parts.append(file.read(_SAMPLE_BYTES))
        return hash_hex(*parts)

    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer beside the iterations, as `HFFolder.tokenizer_hash`; None when there is none."""
        return tokenizer_hash(self.assets_dir, self.flag) if self.assets_dir else None

    @functools.cached_property
    def metadata(self) -> dcp.Metadata:
        """The checkpoint's index: names, shapes and dtypes of all stored tensors."""
        try:
            with allowed_classes_only():
                metadata = dcp.FileSystemReader(self.iteration_dir).read_metadata()
        except MkdCheckpointError as error:
            raise self.error(f"{self.iteration_dir.name}: {error}") from error
        except _DAMAGE as error:
            raise self.error(f"{self.iteration_dir.name}/.metadata is damaged ({error})") from error
        if changed_index(self.iteration_dir):
            raise self.error(f"{self.iteration_dir.name}/.metadata is not what was written (its SHA-256 differs)")
        return metadata

    def load(self, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place: key -> tensor, or a block with its offset in the stored tensor."""
        try:
            with allowed_classes_only():
                dcp.load(state, storage_reader=_Reader(self.iteration_dir, self.metadata), no_dist=True)
        except _DAMAGE as error:
            keys = ", ".join(state)
            raise self.error(f"{keys} cannot be read from {self.iteration_dir.name} ({_reason(error)})") from error

    def _resolve(self, step: int | None) -> Path:
        if (self.path / "metadata.json").is_file():
            return self.path
        tracker = self.path / TRACKER
        if not tracker.is_file():
            hint = hf_hint(self.path, self.flag) or "; give the folder that --save wrote, or one of its iter_ folders"
            raise self.error(f"there is no {TRACKER}{hint}")
        try:
            text = read_regular(tracker, TRACKER_BYTES).decode(errors="replace").strip()
        except ValueError as error:
            raise self.error(f"{TRACKER}: {error}") from None
        if (name := tracked_folder(text)) is None:
            raise self.error(f"{TRACKER} holds {text[:40]!r} instead of an iteration number")
        if step and name == "release":
            raise self.error(f"{TRACKER} names release, the only checkpoint there: leave --ckpt-step {step} out")
        target = self.path / (iteration_name(step) if step else name)
        if not target.is_dir():
            source = "--ckpt-step" if step else TRACKER
            raise self.error(f"{source} names {step or text}, but there is no {target.name}")
        return target

    def _check_iteration_dir(self) -> None:
        name = self.iteration_dir.name
        try:
            backend = read_json(self.iteration_dir / "metadata.json")["sharded_backend"]
        except FileNotFoundError as error:
            raise self.error(
                f"{name} has no metadata.json: it is incomplete, or not a torch_dist checkpoint"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self.error(f"{name}/metadata.json is damaged ({error!r})") from error
        if backend != "torch_dist":
            raise self.error(f"{name} is in format {backend}; only torch_dist is read (--ckpt-format torch_dist)")
        if not (self.iteration_dir / ".metadata").is_file():
            raise self.error(f"{name} has no .metadata: it is incomplete")


class _Reader(dcp.FileSystemReader):
    """A file reader whose index has been read already."""

    def __init__(self, path: Path, metadata: dcp.Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self) -> dcp.Metadata:
        return self._metadata


def _reason(error: BaseException) -> str:
    """One line about an error; torch collects the errors of all ranks, and the first is used."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) if isinstance(error, MkdError) else f"{type(error).__name__}: {error}".splitlines()[0]
