"""The whole of a vision-language model around a trained text model: its configuration, vision tower and projector.

A checkpoint holds the text model alone. `hf_assets` names the folder that the training began with; an export reads the
other tensors there and checks that it is the same folder.
"""

import os
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mkd.checkpoint.hf.families.vision_language import TEXT, VisionLanguage, vision_language_of
from mkd.checkpoint.hf.folder import WHOLE_MODEL, HFFolder
from mkd.checkpoint.hf.writer import Plan, config_with_dtype
from mkd.checkpoint.tokenizer_hash import read_json_object
from mkd.errors import MkdCheckpointError


class ModelOrigin(Protocol):
    """The origin of a model: a checkpoint, or a running job."""

    flag: str
    """The flag of the model, for messages."""

    @property
    def args(self) -> Namespace:
        """Megatron's arguments."""
        ...

    @property
    def assets_dir(self) -> Path | None:
        """Folder with the Hugging Face configuration and tokenizer; None without one."""
        ...

    def error(self, text: str) -> MkdCheckpointError:
        """An error that names the model."""
        ...


def stored_config(folder: ModelOrigin) -> dict[str, Any] | None:
    """config.json in the checkpoint's `hf_assets`, of the whole model; None without it."""
    if folder.assets_dir is None or not (folder.assets_dir / "config.json").is_file():
        return None
    return read_json_object(folder.assets_dir / "config.json", folder.flag)


def stored_architecture(folder: ModelOrigin) -> VisionLanguage | None:
    """The vision-language architecture that the checkpoint's text model is a part of; None for a text model alone."""
    config = stored_config(folder)
    return None if config is None else vision_language_of(config)


class WholeModel:
    """The model around a text model that is written; for a folder of a text model alone that model itself."""

    def __init__(self, folder: HFFolder) -> None:
        self._folder = folder

    @classmethod
    def of_checkpoint(cls, checkpoint: ModelOrigin, base: str | None = None) -> "WholeModel | None":
        """The model around a checkpoint's text model; None for a text model alone.

        Args:
            checkpoint: the checkpoint.
            base: the folder that the training began with (--base); None: the one that `hf_assets` names.

        Raises:
            MkdCheckpointError: the folder is missing, damaged, or another one.
        """
        known = stored_architecture(checkpoint)
        if known is None:
            return None
        what = f"the text model of a {known.architecture}"
        remedy = (
            "give the folder that the training began with, whose vision tower the export copies, in --base of mkd "
            "convert export"
        )
        record = checkpoint.assets_dir / WHOLE_MODEL
        if not record.is_file():
            raise checkpoint.error(f"it is {what}, and {record.parent.name}/{WHOLE_MODEL} is missing: {remedy}")
        stored = read_json_object(record, checkpoint.flag)
        path, fingerprint = stored.get("folder"), stored.get("fingerprint")
        if not isinstance(path, str) or not isinstance(fingerprint, str):
            raise checkpoint.error(f"{record.parent.name}/{WHOLE_MODEL} has no folder and fingerprint: {remedy}")
        if base is None and not os.path.isdir(path):  # False for what is not a path, too
            raise checkpoint.error(f"it is {what} in {path}, which is not there any more: {remedy}")
        folder = HFFolder(base or path, checkpoint.flag if base is None else "--base")
        if (found := folder.fingerprint()) != fingerprint:
            raise checkpoint.error(f"it is {what} with fingerprint {fingerprint}, {folder.path} has {found}: {remedy}")
        return cls(folder)

    def plan(self, text: Plan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of all tensors by their names in the folder: those of the text model, then the others."""
        carried = {name: (entry.shape, entry.dtype) for name, entry in self._folder.carried.items()}
        own = {self.stored(name): (self._exchanged(name, shape), dtype) for name, (shape, dtype) in text.items()}
        return own | carried

    def stored(self, name: str) -> str:
        """Name in the folder of a tensor of the text model."""
        return self._folder.names.stored(name)

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the text model with its axes in the order of the folder."""
        return tensor.transpose(1, 2) if name in self._folder.transposed else tensor

    def _exchanged(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1]) if name in self._folder.transposed else shape

    def carried(self, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the tensors to carry over, in the order of the plan; None: of all names."""
        for name, entry in self._folder.carried.items():
            if wanted is None or name in wanted:
                yield name, entry.read(None, None)

    def config(self, dtype: torch.dtype, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """config.json of the whole model with the dtype of the text model's weights, and changed keys of that."""
        known, config = self._folder.vision_language, self._folder.whole_config
        if known is None:
            return config_with_dtype({**config, **(changes or {})}, dtype)
        config = known.with_text(config, changes or {})
        if isinstance(text := config.get(TEXT), dict) and not text.keys().isdisjoint(("dtype", "torch_dtype")):
            config = {**config, TEXT: config_with_dtype(text, dtype)}
        return config_with_dtype(config, dtype)
