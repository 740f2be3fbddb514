"""Restricts what the pickles of a torch_dist checkpoint can name.

`.metadata` is a pickle that torch reads with `pickle.load`, and torch reads the stored objects (arguments, random
states) with `weights_only=False`: a prepared folder runs code when it is only inspected. Inside `allowed_classes_only`
both are read with a list of classes. Everything that reads a checkpoint, Megatron included, is called inside of it.

A pickle of allowed classes can still set attributes of these classes, and take memory out of proportion to its size
(an index of its memo is the size of an array): the former is undone and refused, the latter is limited.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumType
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mkd.errors import MkdCheckpointError
from mkd.utils.json_files import read_regular
from mkd.utils.limits import limited

_INDEX_BYTES = 4 << 30
"""Largest `.metadata`."""
_MEMORY, _GROWTH = 1 << 30, 64
"""Bytes of memory that reading a pickle may take, and further ones per byte of the pickle."""
_SECONDS = 3600.0
"""Time for a pickle; one of gigabytes takes a minute."""

_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_PLANS = ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
"""Records of what each rank has written, which Megatron leaves in the index under newer versions of torch."""
INDEX_CLASSES = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
        *(("torch.distributed.checkpoint.planner", name) for name in _PLANS),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "device"),
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
    }
)
"""(module, name) of everything that `.metadata` may name, besides the dtypes of torch."""
_NUMPY: list[Any] = [
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type) and issubclass(kind, np.dtype)),
    multiarray.scalar,
    (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # numpy 1
    (multiarray.scalar, "numpy.core.multiarray.scalar"),
]
"""Arrays and numbers of numpy, in random states and arguments; Megatron registers those of numpy 2 in part."""


class IndexUnpickler(pickle.Unpickler):
    """Reads `.metadata` and imports nothing outside `INDEX_CLASSES`.

    Raises:
        MkdCheckpointError: it names something else that exists here.
        pickle.UnpicklingError: it names something that does not exist, as after a changed byte.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in INDEX_CLASSES:
            return super().find_class(module, name)
        if not _exists(module, name):
            raise pickle.UnpicklingError(f"there is no {module}.{name}")
        raise refusal(".metadata", [f"{module}.{name}"])


def _exists(module: str, name: str) -> bool:
    """True if a module may have the name; nothing is imported to find out."""
    if module in sys.modules:
        return name.split(".")[0] in vars(sys.modules[module])
    try:
        return find_spec(module.split(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def refusal(file: str, names: list[str]) -> MkdCheckpointError:
    """An error that names the refused classes or functions."""
    return MkdCheckpointError(
        f"{file} would run code when it is read: it names {', '.join(names)}, which is no part of a checkpoint. Do not "
        "use it; take the checkpoint from its source again"
    )


def read_index(content: bytes) -> Metadata:
    """The index of a checkpoint.

    Raises:
        MkdCheckpointError: it names, or changes, what is no part of an index.
        pickle.UnpicklingError, ValueError: it is damaged.
    """
    before = _attributes()
    try:
        with limited(_SECONDS, _MEMORY + _GROWTH * len(content)):
            metadata = IndexUnpickler(io.BytesIO(content)).load()
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError, EOFError) as error:
        # A changed byte can be another operation, on an object that does not have it.
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
    finally:
        changed = _restore(before)
    if changed:
        raise MkdCheckpointError(
            f".metadata changes {', '.join(changed)} when it is read, which no checkpoint does. Do not use it; take "
            "the checkpoint from its source again"
        )
    _check_types(metadata)
    return metadata


def _attributes() -> list[tuple[Any, str, dict[str, Any]]]:
    """(object, name, attributes) of the classes in `INDEX_CLASSES` and the members of their enumerations."""
    found = []
    for module, name in sorted(INDEX_CLASSES):
        value = getattr(sys.modules.get(module), name, None)
        if value is not None:
            members = list(value) if isinstance(value, EnumType) else []
            found += [(one, f"{module}.{name}", dict(getattr(one, "__dict__", {}))) for one in (value, *members)]
    return found


def _restore(before: list[tuple[Any, str, dict[str, Any]]]) -> list[str]:
    """Undo changes since `_attributes`; the names of the changed classes."""
    changed = []
    for value, name, attributes in before:
        now = dict(getattr(value, "__dict__", {}))
        if len(now) == len(attributes) and all(now.get(key, before) is old for key, old in attributes.items()):
            continue
        changed.append(name)
        for key in now.keys() | attributes.keys():
            if key not in attributes:
                delattr(value, key)
            elif now.get(key, before) is not attributes[key]:
                setattr(value, key, attributes[key])
    return changed


def _check_types(metadata: Any) -> None:
    """Raise ValueError unless an index has the types that torch and mkd read."""
    if not isinstance(metadata, Metadata):
        raise ValueError(f"a {type(metadata).__name__} instead of an index")
    tensors, blocks = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(tensors, dict) or not all(_is_entry(key, value) for key, value in tensors.items()):
        raise ValueError("a list of tensors that is none")
    if not isinstance(blocks, dict) or not all(_is_block(key, value) for key, value in blocks.items()):
        raise ValueError("a list of blocks that is none")
    if not isinstance(getattr(metadata, "storage_meta", None), StorageMeta | None):
        raise ValueError("facts about its files that are none")


def _is_entry(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or isinstance(value, BytesStorageMetadata):
        return isinstance(key, str)
    found = getattr(value, "__dict__", {})
    properties, chunks = found.get("properties"), found.get("chunks")
    return (
        isinstance(value, TensorStorageMetadata)
        and isinstance(properties, TensorProperties)
        and isinstance(getattr(properties, "dtype", None), torch.dtype)
        and isinstance(found.get("size"), torch.Size)
        and isinstance(chunks, list)
        and all(
            isinstance(one, ChunkStorageMetadata)
            and isinstance(getattr(one, "offsets", None), torch.Size)
            and isinstance(getattr(one, "sizes", None), torch.Size)
            for one in chunks
        )
    )


def _is_block(key: Any, value: Any) -> bool:
    found = getattr(value, "__dict__", {})
    return (
        isinstance(key, MetadataIndex)
        and isinstance(value, _StorageInfo)
        and isinstance(found.get("relative_path"), str)
        and all(type(found.get(name)) is int and found[name] >= 0 for name in ("offset", "length"))
    )


def load_object(file: io.BytesIO | str | os.PathLike) -> Any:
    """An object that `torch.save` wrote, with the classes that torch and Megatron register as safe, and numpy's.

    Raises:
        MkdCheckpointError: it names something else.
        pickle.UnpicklingError: it takes memory out of proportion to its size.
    """
    size = len(file.getbuffer()) if isinstance(file, io.BytesIO) else os.path.getsize(file)
    try:
        with torch.serialization.safe_globals(_NUMPY), limited(_SECONDS, _MEMORY + _GROWTH * size):
            return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError as error:
        raise pickle.UnpicklingError(f"{size} bytes take too much memory") from error
    except pickle.UnpicklingError:
        if isinstance(file, io.BytesIO):
            file.seek(0)
        if names := _unsafe_names(file):
            name = "a stored object" if isinstance(file, io.BytesIO) else os.path.basename(file)
            raise refusal(name, names) from None
        raise


def _unsafe_names(file: io.BytesIO | str | os.PathLike) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # damaged, or an old format of torch
        return []


@contextmanager
def allowed_classes_only() -> Iterator[None]:
    """Inside the `with` block, every checkpoint that this process reads is read with a list of classes."""
    import megatron.core  # noqa: F401  (registers its classes)

    read_metadata, load_bytes = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = _read_metadata, _load_bytes
    try:
        yield
    finally:
        FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = read_metadata, load_bytes


def _read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """As in torch 2.11, with another unpickler."""
    path = Path(self._get_metadata_path(kwargs.get("rank")))
    metadata = read_index(read_regular(path, _INDEX_BYTES))
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _load_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
    """As in torch 2.11, with `weights_only=True`."""
    found, name = load_object(value), read_item.dest_index.fqn
    if self.flatten_state_dict:
        torch.distributed.checkpoint.default_planner.set_element(self.original_state_dict, self.mappings[name], found)
    else:
        self.state_dict[name] = found
