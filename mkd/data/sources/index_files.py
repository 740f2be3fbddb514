"""Index files of Megatron's data sets in the data cache: they get their names together, and are checked when read.

Megatron stores the order of a set's samples in .npy files. megatron-core 0.19 writes them in place, so that a full disk
or a killed job leaves a set that looks complete, and reads them with pickles allowed and without a check. Here they are
written elsewhere and get their names together, with checksums, and no file is read that holds anything but integers.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from mkd.utils.atomic_files import hash_of, naming, publish_files, scratch_folder
from mkd.utils.json_files import read_json

_CHECKSUMS, _DESCRIPTION = "checksums.json", "description.txt"
"""Ends of the names of a set's files. Megatron uses them if the arrays and the description exist; the checksums of the
arrays are mkd's, and absent beside files of older versions."""
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class IndexFiles:
    """The index files of one data set."""

    def __init__(self, folder: str | Path, name: str, arrays: Sequence[str]) -> None:
        """Args:
        folder: the folder of the data cache.
        name: beginning of the files' names.
        arrays: ends of the names of the arrays.
        """
        self.base = Path(folder, name)
        self._arrays = [Path(folder, f"{name}-{end}") for end in arrays]
        self._checksums, self._description = (Path(folder, f"{name}-{end}") for end in (_CHECKSUMS, _DESCRIPTION))

    @property
    def are_missing(self) -> bool:
        """True on rank 0 if it has to build them."""
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return is_first and not all(map(Path.is_file, (*self._arrays, self._description)))

    def publish[Built](self, build: Callable[[str], Built]) -> Built:
        """Build the files in a temporary folder, whose path `build` gets, and give them their names together."""
        with scratch_folder(self.base) as scratch, naming(self.base):
            built = build(str(scratch))
            hashes = json.dumps({file.name: hash_of(scratch / file.name) for file in self._arrays})
            (scratch / self._checksums.name).write_text(hashes)
            finals = (*self._arrays, self._checksums, self._description)
            publish_files({scratch / file.name: file for file in finals})
        return built

    def check(self) -> None:
        """Raise ValueError if an array holds anything but integers, or, on rank 0, is not what was written."""
        for file in self._arrays:
            require_integers(file)
        if not self._checksums.is_file() or (dist.is_initialized() and dist.get_rank() != 0):
            return
        stored = read_json(self._checksums)
        for file in self._arrays:
            if not isinstance(stored, dict) or stored.get(file.name) != hash_of(file):
                raise ValueError(f"the checksum of {file.name} does not match")


def require_integers(file: Path) -> None:
    """Check the header of a .npy file.

    Raises:
        ValueError: it is not an array of integers, such as one of objects, which are pickles; or it has another size.
    """
    try:
        with file.open("rb") as content:
            shape, _, dtype = _HEADERS[np.lib.format.read_magic(content)](content)
            size = content.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
    except OSError:
        raise
    except Exception as error:  # a header is an expression in Python's syntax, which numpy parses
        raise ValueError(f"{file.name} has no header of an array ({type(error).__name__})") from error
    if dtype.kind not in "iu":
        raise ValueError(f"{file.name} has the dtype {dtype} instead of integers")
    if file.stat().st_size != size:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes instead of {size}")
