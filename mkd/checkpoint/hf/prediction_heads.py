"""Heads for multi-token prediction of a folder, which no text model reads: an export may copy them."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from mkd.checkpoint.hf.check import left_out_names, read_architecture
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.writer import Plan
from mkd.config.megatron.arg_names import ArgRole, names_with


class PredictionHeads:
    """The tensors `mtp.*` of a folder, for the export of a model of the same architecture."""

    def __init__(self, folder: HFFolder, names: Collection[str]) -> None:
        self._folder, self._names = folder, names

    @classmethod
    def of_folder(cls, path: str, family: Family, args: Mapping[str, Any]) -> "PredictionHeads":
        """The heads in a folder.

        Args:
            path: the folder (--mtp).
            family: of the exported model.
            args: its Megatron arguments.

        Raises:
            MkdCheckpointError: the folder is damaged, has no such heads, or is of another architecture.
        """
        folder = HFFolder(path, "--mtp")
        other, sizes = read_architecture(folder)
        if other != family:
            raise folder.error(f"it is a {other.architectures[0]}, the checkpoint a {family.architectures[0]}")
        for name in sorted(sizes.keys() - {"num_layers", *names_with(ArgRole.RUN_CHOICE)}):
            if sizes[name] != args[name] and not isinstance(sizes[name], list):  # lists are by layer
                flag = name.replace("_", "-")
                raise folder.error(
                    f"--{flag} of its model is {sizes[name]}, that of the checkpoint {args[name]}: its heads do not fit"
                )
        names = left_out_names(folder, family)
        if not names:
            raise folder.error("there are no heads for multi-token prediction (tensors mtp.*): leave --mtp out")
        return cls(folder, names)

    def plan(self, dtype: Any = None) -> Plan:
        """Name -> shape and dtype: the stored one unless another is given."""
        found = {name: self._folder.tensors[name] for name in self._names}
        return {name: (shape, stored if dtype is None else dtype) for name, (shape, stored) in found.items()}

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of those that are wanted, in the order of the plan."""
        for name in self._names:
            if name in wanted:
                yield name, self._folder.read(name)
