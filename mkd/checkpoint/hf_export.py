"""From a Megatron checkpoint (torch_dist) to a Hugging Face folder, without a process group and without a model."""

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mkd.checkpoint.hf_families import FAMILIES, Entry, Family, family_of
from mkd.checkpoint.hf_folder import ASSET_FILES, read_json_object
from mkd.checkpoint.hf_writer import (
    Plan,
    StagedFolder,
    WeightsWriter,
    check_output,
    config_with_dtype,
    plan_bytes,
    write_json,
)
from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.checkpoint.progress import ByteProgress
from mkd.errors import MkdCheckpointError

# Beginnings of the keys under which a checkpoint holds model weights; the others are optimizer, RNG and job state.
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "encoder.", "mtp.")
_DROPOUTS = {"attention_dropout", "hidden_dropout"}


def export_hf(folder: MegatronFolder, out: Path, dtype: torch.dtype | None = None, flag: str = "--hf") -> None:
    """Write the model of a Megatron checkpoint as a Hugging Face folder that `transformers` loads.

    Weights keep their stored dtype unless `dtype` is given; rows that pad the vocabulary are dropped. config.json,
    generation config and tokenizer come from the checkpoint's `hf_assets` folder; without it, config.json is made from
    the stored arguments and there is no tokenizer. The folder appears under its name when it is complete.

    Raises `MkdCheckpointError` when `out` (given by `flag`) is not free, when the architecture has no Hugging Face form
    here, and when a tensor is missing, of another shape, or unknown; it names the tensor.
    """
    check_output(out, flag)
    family, config, args = _architecture(folder)
    source = _StoredTensors(folder, family, args)
    plan = source.plan(dtype)
    with StagedFolder(out, flag) as staged, ByteProgress(f"writing {out}", plan_bytes(plan)) as progress:
        writer = WeightsWriter(staged.path, plan)
        for name, tensor in source.read_all():
            writer.write(name, tensor.to(plan[name][1]))
            progress.advance(tensor.numel() * plan[name][1].itemsize)
        writer.close()
        for name in ASSET_FILES:
            if folder.assets_dir and (folder.assets_dir / name).is_file():
                shutil.copyfile(folder.assets_dir / name, staged.path / name)
        write_json(staged.path / "config.json", config_with_dtype(config, next(iter(plan.values()))[1]))


def _architecture(folder: MegatronFolder) -> tuple[Family, dict[str, Any], dict[str, Any]]:
    """(family, config.json, Megatron arguments by name) of a checkpoint."""
    stored = vars(folder.args)
    if folder.assets_dir is not None and (folder.assets_dir / "config.json").is_file():
        config = read_json_object(folder.assets_dir / "config.json", folder.flag)
        family = family_of(config)
        args = family.megatron_args(config)
        for name in args.keys() - _DROPOUTS:
            if stored.get(name) != args[name] and not (name == "vocab_size" and stored.get(name) is None):
                raise folder.error(
                    f"the checkpoint was made with --{name.replace('_', '-')} {stored.get(name)}, its "
                    f"{folder.assets_dir.name}/config.json says {args[name]}"
                )
        return family, config, args
    family, config = _family_of_args(folder.args)
    return family, config, family.megatron_args(config)


def _family_of_args(args: Namespace) -> tuple[Family, dict[str, Any]]:
    """The first family that can express the arguments, and its config.json."""
    reasons = []
    values = {**vars(args), "vocab_size": args.vocab_size or args.padded_vocab_size}
    for family in FAMILIES:
        try:
            return family, family.hf_config(values)
        except MkdCheckpointError as error:
            reasons.append(str(error))
    raise MkdCheckpointError("no known Hugging Face architecture is like this checkpoint: " + "; ".join(reasons))


class _StoredTensors:
    """The model tensors of a checkpoint, read one layer's parameter at a time."""

    def __init__(self, folder: MegatronFolder, family: Family, args: dict[str, Any]) -> None:
        self._folder, self._family, self._args = folder, family, args
        self._stored = {
            key: stored
            for key, stored in folder.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and key.startswith(_MODEL_KEYS)
        }
        self._items = list(self._find_items())
        known = {key for _, key, _, _ in self._items} | {"output_layer.weight"}
        for key in self._stored.keys() - known:
            raise folder.error(f"tensor {key} is not part of {family.architectures[0]}")

    def plan(self, dtype: torch.dtype | None) -> Plan:
        """Hugging Face names with shape and dtype, in the order of `read_all`."""
        return {
            name: (shape, dtype or self._stored[key].properties.dtype)
            for _, key, _, shapes in self._items
            for name, shape in shapes.items()
        }

    def read_all(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) for the whole model."""
        dims = self._family.dims(self._args)
        for entry, key, layer, shapes in self._items:
            parts = entry.layout.split(self._read(key, layer), dims)
            for (name, shape), part in zip(shapes.items(), parts, strict=True):
                if tuple(part.shape) != shape:
                    raise self._folder.error(f"tensor {key} gives {name} shape {list(part.shape)}, not {list(shape)}")
                yield name, part

    def _find_items(self) -> Iterator[tuple[Entry, str, int | None, dict[str, tuple[int, ...]]]]:
        """(entry, key, index into the key's stacked layers or None, Hugging Face names with shapes)."""
        tied = set() if self._args["untie_embeddings_and_output_weights"] else set(self._family.tied)
        for entry, layer, shapes in self._family.tensors(self._args):
            if tied.issuperset(shapes):
                continue
            names = (entry.megatron, *entry.aliases)
            single = next((n for n in (name.format(layer=layer) for name in names) if n in self._stored), None)
            stacked = next((n for n in (name.replace("{layer}.", "") for name in names) if n in self._stored), None)
            if single is None and stacked is None:
                raise self._folder.error(f"tensor {entry.megatron.format(layer=layer)} is missing")
            if single is None and self._stored[stacked].size[0] != self._args["num_layers"]:
                raise self._folder.error(
                    f"tensor {stacked} holds {self._stored[stacked].size[0]} layers, --num-layers is "
                    f"{self._args['num_layers']}"
                )
            yield entry, single or stacked, None if single else layer, shapes

    def _read(self, key: str, layer: int | None) -> Tensor:
        """One parameter. Equal layers are stored as one tensor [layers, ...]: only the block of `layer` is read."""
        size, dtype = self._stored[key].size, self._stored[key].properties.dtype
        shape = size if layer is None else (1, *size[1:])
        data = torch.empty(shape, dtype=dtype)
        offset = (layer or 0, *(0 for _ in size[1:]))
        fragments = tuple(whole // part for whole, part in zip(size, shape, strict=True))
        block = ShardedTensor(key, data, dtype, tuple(shape), tuple(size), offset, fragments)
        self._folder.load({key: CheckpointableShardedTensor.from_sh_ten(block)})
        return data if layer is None else data[0]
