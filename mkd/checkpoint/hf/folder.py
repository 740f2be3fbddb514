"""A Hugging Face model folder: checked before a weight is read, then read slice by slice.

Opening a folder reads config.json, the index and the headers of the weight files, which is quick for folders of any
size and finds an interrupted download. `mkd.checkpoint.hf.check` then compares the tensors with config.json.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.hf.families.vision_language import TextNames, transposed_experts, vision_language_of
from mkd.checkpoint.safetensors_files import TensorEntry, TransposedEntry, read_header
from mkd.checkpoint.staged_reads import Staging
from mkd.checkpoint.tokenizer_hash import ASSETS, read_json_object, tokenizer_hash
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import copy_file, write_bytes
from mkd.utils.model_folders.formats import CONFIG, megatron_hint
from mkd.utils.model_folders.hub_folder import download_hint, model_folder
from mkd.utils.model_folders.tokenizer_files import PROCESSOR_FILES, TOKENIZER_FILES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ASSET_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES)
WHOLE_MODEL = "whole_model.json"
"""File in `hf_assets` that names the folder of a vision-language model, with its fingerprint."""

# config.json keys about how a folder was written or is used; they do not change the model
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "pretraining_tp"}
_SAMPLE_BYTES = 4096
ROWS_PER_BLOCK = 4096


class HFFolder:
    """A folder with `config.json` and safetensors weights, or a folder of the hub's cache with one.

    Construction reads only JSON and the safetensors headers, and raises `MkdCheckpointError` when the folder is
    missing, empty or incomplete. Every message names `flag`, the command-line flag that gave the folder.

    A vision-language folder is read as its text model: `config`, `tensors` and `read` are of a text model alone, with
    the names of its family. The other tensors are in `carried`.
    """

    def __init__(self, path: str | os.PathLike, flag: str) -> None:
        self.path = model_folder(path, flag)
        self.flag = flag
        self._check_folder()
        self.whole_config: dict[str, Any] = read_json_object(self.path / "config.json", flag)
        """config.json as it is."""
        self._entries = self._read_headers()
        try:
            self.vision_language = vision_language_of(self.whole_config)
        except MkdCheckpointError as error:
            raise self.error(str(error)) from error
        self.names = TextNames()
        """Names of the text model's tensors in the files."""
        self.config: dict[str, Any] = self.whole_config
        self.carried: dict[str, TensorEntry] = {}
        """Tensors of the vision tower and the projector."""
        self.transposed: frozenset[str] = frozenset()
        """Text tensors whose last two axes are exchanged in the files."""
        self._text = self._entries
        self._equal: dict[tuple[str, str], bool] = {}
        if self.vision_language is not None:
            self._find_text_model()
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (entry.shape, entry.dtype) for name, entry in self._text.items()
        }

    def error(self, text: str) -> MkdCheckpointError:
        """An error that names the folder and its flag."""
        return MkdCheckpointError(f"{self.flag} {self.path}: {text}")

    def read(
        self, name: str, rows: slice | None = None, cols: slice | None = None, staging: Staging | None = None
    ) -> Tensor:
        """The tensor `name`, or a block of its first (`rows`) and second (`cols`) dimension, as stored, on the CPU or,
        with `staging`, on its device.

        Only the bytes of the block are read.

        Raises:
            MkdCheckpointError: the folder has no such tensor.
        """
        if name not in self._text:
            raise self.error(f"there is no tensor {name}")
        entry = self._text[name]
        return entry.read(rows, cols) if staging is None else staging.read(entry, rows, cols)

    def row_blocks(self, name: str) -> Iterator[slice]:
        """Consecutive blocks of rows, to process a tensor of many gigabytes with little memory."""
        rows = self.tensors[name][0][0]
        for start in range(0, rows, ROWS_PER_BLOCK):
            yield slice(start, min(start + ROWS_PER_BLOCK, rows))

    def are_equal(self, first: str, second: str) -> bool:
        """True if two tensors are equal. Compared once, block by block: an embedding may have gigabytes."""
        if (first, second) not in self._equal:
            blocks = self.row_blocks(first)
            self._equal[first, second] = all(torch.equal(self.read(first, b), self.read(second, b)) for b in blocks)
        return self._equal[first, second]

    def tokenizer_hash(self) -> str | None:
        """128-bit hex hash of the tokenizer's vocabulary, merges and added tokens; None when there is no tokenizer.

        In folders with equal hashes, equal ids mean equal tokens. The chat template is not part of the hash.
        """
        return tokenizer_hash(self.path, self.flag)

    def fingerprint(self) -> str:
        """128-bit hex hash of config.json and, for each tensor, its name, shape, dtype and 8 KiB of its bytes.

        It does not depend on how the weights are split into files. Sampling keeps it fast for hundreds of gigabytes;
        two checkpoints of one training run differ in every sampled block.
        """
        digest = hashlib.blake2b(digest_size=16)
        kept = {
            key: value for key, value in self.whole_config.items() if key not in _VOLATILE_KEYS and value is not None
        }
        digest.update(json.dumps(_without_repetitions(kept), sort_keys=True).encode())
        for name in sorted(self._entries):
            entry = self._entries[name]
            digest.update(f"{name} {entry.shape} {entry.dtype}".encode())
            with entry.file.open("rb") as file:
                for start in (0, entry.nbytes // 2):
                    file.seek(entry.offset + start)
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.nbytes - start)))
        return digest.hexdigest()

    def assets(self) -> list[Path]:
        """config.json, generation_config.json, tokenizer files and chat template: the files that an export copies."""
        return [self.path / name for name in ASSET_FILES if (self.path / name).is_file()]

    def _find_text_model(self) -> None:
        self.names = TextNames.find(self._entries)
        text, self.carried = {}, {}
        for stored, entry in self._entries.items():
            name = self.names.text(stored)
            if name is None:
                self.carried[stored] = entry
            elif text.setdefault(name, entry) is not entry:
                raise self.error(f"there are two tensors {name} of the text model, one of them under the name {stored}")
        self._text = text
        try:
            if self.vision_language.has_joined_experts:
                self.transposed = transposed_experts({name: entry.shape for name, entry in text.items()})
                self._text = text | {name: TransposedEntry.of(text[name]) for name in self.transposed}
            self.config = self.vision_language.text_config(self.whole_config, "lm_head.weight" in text)
        except MkdCheckpointError as error:
            raise self.error(str(error)) from error

    def _check_folder(self) -> None:
        if not self.path.exists():
            raise self.error(f"the folder does not exist{download_hint(self.path)}")
        if not self.path.is_dir():
            raise self.error("this is a file; give the folder that holds config.json and the safetensors files")
        names = {entry.name for entry in self.path.iterdir()}
        if not names:
            raise self.error("the folder is empty")
        if CONFIG not in names:
            hint = megatron_hint(self.path, self.flag) or "; give the folder of a Hugging Face model"
            raise self.error(f"there is no {CONFIG}{hint}")
        if not names & {WEIGHTS, INDEX}:
            raise self.error(f"there is neither {WEIGHTS} nor {INDEX}; other weight formats are not read")

    def _read_headers(self) -> dict[str, TensorEntry]:
        if (self.path / WEIGHTS).is_file():
            return read_header(self.path / WEIGHTS, self.flag)
        files = self._indexed_files()
        entries: dict[str, TensorEntry] = {}
        for file, names in files.items():
            header = read_header(self.path / file, self.flag)
            for name in names:
                if name not in header:
                    raise self.error(f"{INDEX} places tensor {name} in {file}, which does not contain it")
            for name in header.keys() & entries.keys():
                raise self.error(f"tensor {name} is both in {entries[name].file.name} and in {file}")
            entries.update(header)
        return entries

    def _indexed_files(self) -> dict[str, list[str]]:
        """Weight files that the index names -> names of the tensors that each must contain."""
        weight_map = read_json_object(self.path / INDEX, self.flag).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self.error(f'{INDEX} has no "weight_map"')
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            # A plain file name cannot lead out of the folder. Links are followed: the hub's cache stores weights behind
            # them.
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\\" in file:
                raise self.error(f"{INDEX} places tensor {name} in {file!r}, which is not a file name in this folder")
            files.setdefault(file, []).append(name)
        for file in files:
            if not (self.path / file).is_file():
                raise self.error(f"{INDEX} names {file}, which is missing: copy or download it too")
        return files


def _without_repetitions(config: dict[str, Any]) -> dict[str, Any]:
    """The config without top-level rope keys that repeat `rope_parameters`: exports have them for transformers 4."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config

    def repeats(key: str, value: Any) -> bool:
        if key == "rope_scaling":
            return isinstance(value, dict) and all(rope.get(name) == inner for name, inner in value.items())
        return key in ("rope_theta", "partial_rotary_factor") and rope.get(key) == value

    return {key: value for key, value in config.items() if not repeats(key, value)}


def store_assets(folder: HFFolder, save_dir: str | os.PathLike) -> None:
    """Copy config.json, generation config, tokenizer and chat template into `save_dir/hf_assets`.

    With these files an export of the Megatron checkpoints in `save_dir` does not need the original folder, and the
    stored tokenizer can be compared. Each file is replaced atomically. Call it on one rank.
    """
    target = Path(save_dir) / ASSETS
    target.mkdir(parents=True, exist_ok=True)
    for source in folder.assets():
        copy_file(source, target / source.name)
    if folder.vision_language is not None:
        # An export copies the vision tower from there.
        whole = {"folder": str(folder.path.resolve()), "fingerprint": HFFolder.fingerprint(folder)}
        write_bytes(target / WHOLE_MODEL, json.dumps(whole, indent=2).encode())
