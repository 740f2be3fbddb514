"""meta.json of a teacher cache: the properties that all its records share, with a checksum over all of them."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mkd.errors import MkdCacheError
from mkd.teacher.cache.record_format import MAX_COUNT, RecordFormat
from mkd.utils.json_files import parse_json, read_json
from mkd.utils.near_paths import near_path_hint

FORMAT = "mkd-teacher-cache"
VERSION = 1
META = "meta.json"
_CHECKSUM = "checksum"
"""Key of the checksum in meta.json."""
_PROPERTIES = "properties"
"""Key of the properties in the metadata of a shard."""
_TEMPERATURES = 64
"""Most temperatures of a cache."""
_HOTTEST = 1e6
"""Largest temperature; flags allow less."""


@dataclass(frozen=True)
class CacheMeta:
    """Properties common to all records of a cache."""

    teacher: str
    """Fingerprint of the teacher's architecture and weights."""
    tokenizer: str | None
    """Hash of the tokenizer; None if not known."""
    true_vocab: int
    """Vocabulary size without padding."""
    top_k: int
    """Ids in a record."""
    values: str
    """See `mkd.teacher.cache.record_format.Values`."""
    temperatures: tuple[float, ...] = (1.0,)
    """Temperatures whose tail is stored."""
    samples: int = 0
    """Samples per token, at the last of `temperatures`; `TokenTargets.logits` are then the logs of their relative
    frequencies. 0 for top-k."""
    teacher_dtype: str = ""
    """Dtype of the teacher's layers."""
    positions: str = "segment"
    """Position ids restart at each "segment", or at each "document" in it."""
    labels_only: bool = False
    """True if only supervised tokens have targets and the records of the others are filler; imported caches only."""
    has_tail: bool = True
    """False if the mass of the tail is not known; imported caches only."""
    is_checked: bool = field(default=True, compare=False, kw_only=True)
    """False if an older version of mkd wrote the file, without a checksum."""

    @cached_property
    def records(self) -> RecordFormat:
        """Encoder and decoder of the records."""
        return RecordFormat(self.true_vocab, self.top_k, self.values, self.temperatures, self.samples)

    def to_json(self) -> str:
        """Contents of meta.json."""
        values = {"format": FORMAT, "version": VERSION, **self._properties(), "record": self._record_layout()}
        return json.dumps({**values, _CHECKSUM: _checksum(values)}, indent=2) + "\n"

    def _properties(self) -> dict[str, Any]:
        """Name -> value of all fields of the file."""
        return {name: value for name, value in asdict(self).items() if name != "is_checked"}

    def _record_layout(self) -> dict[str, Any]:
        fields = {name: [int(n) for n in kind.shape] for name, (kind, *_) in self.records.dtype.fields.items()}
        return {"bytes": self.records.dtype.itemsize, "fields": fields}

    @classmethod
    def read(cls, folder: Path, flag: str) -> "CacheMeta":
        """Read meta.json of a folder.

        Raises:
            MkdCacheError: the folder is not a teacher cache, or one of another version.
        """
        file = folder / META
        if not file.is_file():
            what = "is not a teacher cache: it has no meta.json" if folder.is_dir() else "does not exist"
            near = "" if folder.exists() else near_path_hint(folder, Path.is_dir)
            raise MkdCacheError(f"{flag} {folder} {what} (mkd cache write creates one){near}")
        try:
            values: dict[str, Any] = read_json(file)
            if values["format"] != FORMAT:
                raise MkdCacheError(
                    f"{flag} {folder} is not a teacher cache: meta.json has the format {values['format']!r}"
                )
            if values["version"] != VERSION:
                raise MkdCacheError(
                    f"{flag} {folder} has format version {values['version']}, this version of mkd reads {VERSION}: "
                    "use the version of mkd that wrote it, or write it again"
                )
            stored = values.pop(_CHECKSUM, None)
            if stored not in (None, _checksum(values)):
                raise ValueError("its checksum does not match: a value was changed")
            names = [name for name in cls.__dataclass_fields__ if name != "is_checked"]
            _require_types({name: values[name] for name in names})
            properties = {name: values[name] for name in names} | {"temperatures": tuple(values["temperatures"])}
            meta = cls(**properties, is_checked=stored is not None)
            if values["record"] != meta._record_layout():
                raise ValueError("the layout of its records is not that of its other values")
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
            raise MkdCacheError(f"{flag} {folder} is not a teacher cache: meta.json is damaged ({error})") from error
        return meta

    def differences(self, other: "CacheMeta") -> list[str]:
        """One text per field that differs: `name: mine, theirs`."""
        return self._differences(other._properties())

    def _differences(self, theirs: Mapping[str, Any]) -> list[str]:
        mine = self._properties()
        return [f"{name}: {mine[name]}, {theirs[name]}" for name in mine if mine[name] != theirs[name]]

    def to_shard(self) -> dict[str, str]:
        """The properties for the metadata of a shard, which belongs to no other cache."""
        return {_PROPERTIES: json.dumps(self._properties())}

    def shard_differences(self, metadata: Any) -> list[str] | None:
        """`differences` from the properties in the metadata of a shard; None if it has none: an older version of mkd
        wrote it.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: they are damaged.
        """
        if metadata is None:
            return None
        theirs = parse_json(metadata[_PROPERTIES])
        return self._differences({**theirs, "temperatures": tuple(theirs["temperatures"])})


def _checksum(values: Mapping[str, Any]) -> str:
    """128-bit hex hash of everything in meta.json but the checksum itself."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _require_types(values: Mapping[str, Any]) -> None:
    """Raise ValueError that names a property whose value cannot be one."""

    def is_count(value: Any, least: int, most: float) -> bool:
        return type(value) is int and least <= value <= most

    temperatures = values["temperatures"]
    valid = {
        "teacher": isinstance(values["teacher"], str),
        "tokenizer": isinstance(values["tokenizer"], str | None),
        "true_vocab": is_count(values["true_vocab"], 1, math.inf),
        "top_k": is_count(values["top_k"], 1, math.inf),
        "values": values["values"] in ("log12", "fp32", "counts"),
        "temperatures": isinstance(temperatures, list)
        and 1 <= len(temperatures) <= _TEMPERATURES
        and all(type(value) in (int, float) and 0 < value <= _HOTTEST for value in temperatures),
        "samples": is_count(values["samples"], 0, MAX_COUNT)
        and (values["samples"] > 0) == (values["values"] == "counts"),
        "teacher_dtype": isinstance(values["teacher_dtype"], str),
        "positions": values["positions"] in ("segment", "document"),
        "labels_only": isinstance(values["labels_only"], bool),
        "has_tail": isinstance(values["has_tail"], bool),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{name} is {str(values[name])[:60]!r}")
