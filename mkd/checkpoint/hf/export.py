"""Exports a Megatron checkpoint (torch_dist) as a Hugging Face folder, without a process group and without a model."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mkd.checkpoint.casts import CastCheck
from mkd.checkpoint.hf.families import FAMILIES, Family, family_by_name, family_of
from mkd.checkpoint.hf.families.vision_language import vision_language_of
from mkd.checkpoint.hf.folder import ASSET_FILES
from mkd.checkpoint.hf.model_card import model_card
from mkd.checkpoint.hf.prediction_heads import PredictionHeads
from mkd.checkpoint.hf.tables import Axes, Item
from mkd.checkpoint.hf.whole_model import ModelOrigin, WholeModel, stored_config
from mkd.checkpoint.hf.writer import (
    Plan,
    StagedFolder,
    WeightsWriter,
    check_output,
    config_with_dtype,
    plan_bytes,
    write_json,
)
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.config.flags import default_arguments
from mkd.config.megatron.arg_names import ArgRole, comparable, in_order, names_with
from mkd.errors import MkdCheckpointError
from mkd.utils.progress import ByteProgress

# Prefixes of the keys of model weights in a checkpoint; the other keys are optimizer, RNG and job state.
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "encoder.", "mtp.")

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Key of a tensor -> its shape and dtype."""


def export_hf(
    folder: MegatronFolder,
    out: Path,
    dtype: torch.dtype | None = None,
    architecture: str | None = None,
    base: str | None = None,
    mtp: str | None = None,
) -> None:
    """Write the model of a Megatron checkpoint as a Hugging Face folder that `transformers` loads.

    Weights keep their stored dtype unless `dtype` is given; padding rows of the vocabulary are dropped. config.json,
    generation config and tokenizer come from the checkpoint's `hf_assets` folder. Without that folder, config.json is
    made from the stored arguments, for the given `architecture` or for the first one that fits, and there is no
    tokenizer. The vision tower of a vision-language model is copied from `base`, by default the folder that the
    training began with. Heads for multi-token prediction are copied from the folder `mtp`, if it is given. The folder
    appears under its name when it is complete.

    Raises:
        MkdCheckpointError: `out` (--hf) is in use, the model fits no known Hugging Face architecture, a
            tensor is missing, unknown, or of another shape (the message names it), or the folder with the vision tower
            is missing.
    """
    check_output(out, "--hf")
    folder.check_content()
    export = HFExport(folder, dtype, architecture, base, mtp)
    with StagedFolder(out, "--hf") as staged, ByteProgress(f"writing {out}", plan_bytes(export.plan)) as progress:
        export.write(staged.path, on_bytes=progress.advance, name=staged.final.name)


class HFExport:
    """The model of a Megatron checkpoint, to be written by one process or by several together."""

    def __init__(
        self,
        folder: MegatronFolder,
        dtype: torch.dtype | None = None,
        architecture: str | None = None,
        base: str | None = None,
        mtp: str | None = None,
    ) -> None:
        """Check the checkpoint and plan the tensors. No weight is read. Raises `MkdCheckpointError` as `export_hf`."""
        folder.check_whole()
        self._folder = folder
        family, config, args = architecture_of(folder, architecture)
        self._config = family.config_for_transformers_4(config)
        self._source = _CheckpointTensors(folder, family, args)
        self._whole = WholeModel.of_checkpoint(folder, base)
        plan = self._source.plan(dtype)
        self.plan = plan if self._whole is None else self._whole.plan(plan)
        """Names of the folder's files."""
        self._heads = None if mtp is None else PredictionHeads.of_folder(mtp, family, args)
        if self._heads is not None:
            self.plan = {**self.plan, **self._heads.plan(dtype)}
        self._text_names = {name if self._whole is None else self._whole.stored(name): name for name in plan}

    def write(
        self,
        out: Path,
        part: int = 0,
        parts: int = 1,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
        name: str | None = None,
    ) -> None:
        """Write every `parts`-th weight file, beginning with number `part`, into the folder `out`.

        Part 0 also writes all other files, with a card for the model `name` (see `model_card`).
        """
        writer = WeightsWriter(out, self.plan, part=part, parts=parts)
        casts = CastCheck(self._folder.error, "give --dtype bf16 or fp32")
        for key, tensor in self._read(writer.names):
            dtype = self.plan[key][1]
            writer.write(key, casts.cast(key, tensor, dtype))
            on_bytes(tensor.numel() * dtype.itemsize)
        writer.close()
        casts.warn()
        if part > 0:
            return
        assets = self._folder.assets_dir
        for file in ASSET_FILES:
            if assets and (assets / file).is_file():
                shutil.copyfile(assets / file, out / file)
        if (card := model_card(self._folder, name)) is not None:
            (out / "README.md").write_text(card, encoding="utf-8")
        write_json(out / "config.json", self._config_of(next(iter(self.plan.values()))[1]))

    def _read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of some names, in the order of the plan."""
        stored = {text: name for name, text in self._text_names.items()}
        for text, tensor in self._source.read([self._text_names[name] for name in names if name in self._text_names]):
            yield stored[text], tensor if self._whole is None else self._whole.as_stored(text, tensor)
        if self._whole is not None:
            yield from self._whole.carried(set(names))
        if self._heads is not None:
            yield from self._heads.read(set(names))

    def _config_of(self, dtype: torch.dtype) -> dict[str, Any]:
        return config_with_dtype(self._config, dtype) if self._whole is None else self._whole.config(dtype)


def architecture_of(folder: ModelOrigin, name: str | None = None) -> tuple[Family, dict[str, Any], dict[str, Any]]:
    """(family, config.json, Megatron arguments by name) of a checkpoint; of its text model in a vision-language model.

    Args:
        folder: the checkpoint.
        name: a Hugging Face architecture, for a checkpoint without `hf_assets`.

    Raises:
        MkdCheckpointError: no architecture fits, or config.json contradicts the stored arguments.
    """
    stored = {**vars(default_arguments()), **vars(folder.args)}
    if (config := stored_config(folder)) is not None:
        if (known := vision_language_of(config)) is not None:
            config = known.text_config(config, bool(stored["untie_embeddings_and_output_weights"]))
        family = family_of(config)
        if name is not None and family_by_name(name) != family:
            raise folder.error(f"{folder.assets_dir.name}/config.json is of {family.architectures[0]}, not of {name}")
    else:
        values = {**stored, "vocab_size": stored["vocab_size"] or stored["padded_vocab_size"]}
        family, config = _family_of_args(values, FAMILIES if name is None else (family_by_name(name),))
    args = family.megatron_args(config)
    if (name := _first_difference(stored, args)) is not None:
        raise folder.error(
            f"the checkpoint was made with --{name.replace('_', '-')} {stored.get(name)}, its config.json has "
            f"{args[name]}"
        )
    return family, config, args


def _family_of_args(values: dict[str, Any], families: Sequence[Family]) -> tuple[Family, dict[str, Any]]:
    """The first family that can express Megatron's arguments, and its config.json."""
    reasons = []
    for family in families:
        try:
            config = family.hf_config(values)
            if (name := _first_difference(values, written := family.megatron_args(config))) is None:
                return family, config
            reasons.append(
                f"{family.architectures[0]} would have --{name.replace('_', '-')} {written[name]}, the Megatron "
                f"checkpoint was made with {values.get(name)}"
            )
        except MkdCheckpointError as error:
            reasons.append(str(error))
    raise MkdCheckpointError("no known Hugging Face architecture fits this checkpoint: " + "; ".join(reasons))


def _first_difference(stored: Mapping[str, Any], args: Mapping[str, Any]) -> str | None:
    """The first argument of a family's model `args` with another value in a checkpoint; None if there is none."""
    for name in in_order(args.keys() - set(names_with(ArgRole.RUN_CHOICE))):
        is_same = comparable(name, stored) == comparable(name, args)
        if not is_same and not (name == "vocab_size" and stored.get(name) is None):
            return name
    return None


class ModelTensors(ABC):
    """Tensors of a model under the names of a checkpoint, read as those of a Hugging Face folder, one parameter of one
    layer at a time."""

    def __init__(
        self, stored: Stored, family: Family, args: Mapping[str, Any], error: Callable[[str], Exception]
    ) -> None:
        """Find the parameters of the family among the tensors.

        Args:
            stored: shape and dtype of each tensor.
            family: the architecture.
            args: Megatron arguments by name.
            error: makes an error that names the model.
        """
        self._stored, self._family, self._args, self._error = stored, family, args, error
        self._items = list(self._find_items())
        known = {
            name for item in family.tensors(args) for key, _ in item.stored_keys() for name in item.stored_tensors(key)
        }
        for key in stored.keys() - known:
            raise error(f"tensor {key} is not part of {family.architectures[0]}")

    def plan(self, dtype: torch.dtype | None) -> Plan:
        """Hugging Face names with shape and dtype, in the order of `read`."""
        return {
            name: (shape, self._dtype(item, key) if dtype is None or item.entry.in_fp32 else dtype)
            for item, key, _ in self._items
            for name, shape in item.shapes.items()
        }

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) for the wanted names, in the order of the plan."""
        wanted, experts = set(wanted), {}
        dims = self._family.dims(self._args)
        for item, key, axes in self._items:
            if wanted.isdisjoint(item.shapes):
                continue
            blocks = self._blocks(item, key, tuple(index for _, index in axes))
            if blocks is None:
                continue
            parts = item.entry.layout.split(torch.cat(blocks) if len(blocks) > 1 else blocks[0], dims)
            for (name, shape), part in zip(item.shapes.items(), parts, strict=True):
                if item.entry.has_all_experts:
                    full = experts.setdefault(name, part.new_empty(shape))
                    if part.shape == shape[1:]:
                        full[item.expert] = part
                        if item.expert < dims.experts - 1:
                            continue
                        part = experts.pop(name)
                if tuple(part.shape) != shape:
                    raise self._error(f"tensor {key} gives {name} shape {list(part.shape)}, not {list(shape)}")
                if name in wanted:
                    yield name, part

    @abstractmethod
    def _blocks(self, item: Item, key: str, index: tuple[int, ...]) -> list[Tensor] | None:
        """The tensors of `Item.stored_tensors`, which are one parameter; None if this process does not need it.

        Args:
            item: the parameter.
            key: its key.
            index: equal layers and experts may be one tensor, whose block at this index is the parameter.
        """

    def _find_items(self) -> Iterator[tuple[Item, str, Axes]]:
        """(parameter, key, the key's leading axes)."""
        tied = set() if self._args["untie_embeddings_and_output_weights"] else set(self._family.tied)
        for item in self._family.tensors(self._args):
            if tied.issuperset(item.shapes):
                continue
            stored = ((key, axes) for key, axes in item.stored_keys() if item.stored_tensors(key)[0] in self._stored)
            key, axes = next(stored, (None, ()))
            if key is None:
                raise self._error(f"tensor {item.name} is missing")
            for name in item.stored_tensors(key):
                if name not in self._stored:
                    raise self._error(f"tensor {name} is missing")
            for (argument, _), size in zip(axes, self._stored[item.stored_tensors(key)[0]][0], strict=False):
                if size != self._args[argument]:
                    flag, what = "--" + argument.replace("_", "-"), argument.removeprefix("num_")
                    raise self._error(f"tensor {key} holds {size} {what}, {flag} is {self._args[argument]}")
            yield item, key, axes

    def _dtype(self, item: Item, key: str) -> torch.dtype:
        return self._stored[item.stored_tensors(key)[0]][1]


class _CheckpointTensors(ModelTensors):
    """The model tensors of a checkpoint."""

    def __init__(self, folder: MegatronFolder, family: Family, args: Mapping[str, Any]) -> None:
        self._folder = folder
        stored = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in folder.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(MODEL_KEYS)
        }
        super().__init__(stored, family, args, folder.error)

    def _blocks(self, item: Item, key: str, index: tuple[int, ...]) -> list[Tensor]:
        return [self._read(name, index) for name in item.stored_tensors(key)]

    def _read(self, key: str, index: tuple[int, ...]) -> Tensor:
        size, dtype = self._stored[key]
        shape = (*(1 for _ in index), *size[len(index) :])
        data = torch.empty(shape, dtype=dtype)
        offset = (*index, *(0 for _ in size[len(index) :]))
        fragments = tuple(total // part for total, part in zip(size, shape, strict=True))
        block = ShardedTensor(key, data, dtype, shape, size, offset, fragments)
        self._folder.load({key: CheckpointableShardedTensor.from_sh_ten(block)})
        return data.reshape(size[len(index) :])
