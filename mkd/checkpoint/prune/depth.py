"""Writes a pruned student as a Hugging Face folder: a selection of the teacher's layers, channels and heads."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor
from transformers import CONFIG_MAPPING

from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.layouts import Dims
from mkd.checkpoint.hf.whole_model import WholeModel
from mkd.checkpoint.hf.writer import StagedFolder, WeightsWriter, plan_bytes, write_json
from mkd.checkpoint.prune.width import WidthChoice
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.utils.progress import ByteProgress


def select_layers(count: int, every: int | None = None, layers: str | None = None) -> list[int]:
    """Indices of the layers to keep of the teacher's `count` layers, ascending.

    Args:
        count: number of layers of the teacher.
        every: --every: keep layers 0, N, 2N, ...
        layers: --layers: a list such as "0,2,5"; without `every` and `layers` all layers are kept.

    Raises:
        MkdConfigError: naming --every or --layers, when it does not select existing layers.
    """
    if layers is None:
        if every is not None and every < 1:
            raise MkdConfigError(f"--every is {every}; it must be at least 1")
        return list(range(0, count, every or 1))
    try:
        chosen = [int(word) for word in layers.split(",")]
    except ValueError as error:
        raise MkdConfigError(f"--layers is {layers!r}; give layer numbers such as 0,2,5") from error
    if chosen != sorted(set(chosen)) or not all(0 <= layer < count for layer in chosen):
        raise MkdConfigError(f"--layers is {layers}; give ascending numbers from 0 to {count - 1}")
    return chosen


@dataclass(frozen=True)
class TensorSource:
    """The teacher's tensor that a tensor of the student is taken from."""

    name: str
    layer: int | None
    """Layer of the teacher; None outside of the layers."""
    axes: tuple[str, ...]
    """Size of each dimension, as names of `Dims`."""


_FFN_WIDTHS = ("shared_intermediate_size", "intermediate_size")
"""Keys of the width of a dense MLP; a family writes the first one only if it is this width (Granite 4)."""
_WITHOUT_MAMBA = ("mamba_n_heads", "mamba_d_head")
"""Keys that Granite 4 writes so that transformers accepts any hidden_size in a model without Mamba layers."""


class PrunableTeacher:
    """A folder to prune, checked: it holds exactly the tensors that its config.json implies."""

    def __init__(self, path: str) -> None:
        """Raises `MkdCheckpointError` when the folder of --hf is incomplete or its architecture is unknown."""
        self.folder = HFFolder(path, "--hf")
        self.family, self.args = read_architecture(self.folder)
        check_tensors(self.folder, self.family)

    @property
    def dims(self) -> Dims:
        return self.family.dims(self.args)

    def write_student(self, out: Path, layers: list[int], width: WidthChoice | None = None) -> int:
        """Write the student's folder, with the teacher's dtype, tokenizer and generation config.

        One tensor is in memory at a time. The folder appears under its name when it is complete.

        Args:
            out: the folder in --out; new or empty.
            layers: layers of the teacher, ascending.
            width: channels and heads to keep; None keeps all.

        Returns:
            Bytes of weights written.

        Raises:
            MkdCheckpointError: `out` is in use.
            MkdConfigError: as `student_config`.
        """
        sources = self._sources(layers)
        dims = self.dims if width is None else width.student
        config = self.student_config(layers, dims)
        text = {
            name: (tuple(getattr(dims, axis) for axis in source.axes), self.folder.tensors[source.name][1])
            for name, source in sources.items()
        }
        whole = WholeModel(self.folder)
        plan = whole.plan(text)
        with StagedFolder(out, "--out") as staged, ByteProgress(f"writing {out}", plan_bytes(plan)) as progress:
            writer = WeightsWriter(staged.path, plan)
            for name, source in sources.items():
                tensor = self._read(source, width)
                writer.write(whole.stored(name), whole.as_stored(name, tensor))
                progress.advance(tensor.nbytes)
            for name, tensor in whole.carried():
                writer.write(name, tensor)
                progress.advance(tensor.nbytes)
            writer.close()
            for asset in self.folder.assets():
                shutil.copyfile(asset, staged.path / asset.name)
            write_json(staged.path / "config.json", self._whole_config(config))
        return plan_bytes(plan)

    def _whole_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json around that of the student's text model."""
        if (known := self.folder.vision_language) is None:
            return config
        changes = {key: value for key, value in config.items() if self.folder.config.get(key) != value}
        return known.with_text(self.folder.whole_config, changes)

    def _sources(self, layers: list[int]) -> dict[str, TensorSource]:
        """Student tensor -> its source, in the order of the layers, without a tied LM head that is not stored."""
        sources = {}
        for item in self.family.tensors(self.args):
            if item.layer is not None and item.layer not in layers:
                continue
            new = None if item.layer is None else layers.index(item.layer)
            for old, (pattern, axes) in zip(item.shapes, item.entry.sources.items(), strict=True):
                if old in self.folder.tensors:
                    sources[pattern.format(layer=new, expert=item.expert)] = TensorSource(old, item.layer, axes)
        return sources

    def _read(self, source: TensorSource, width: WidthChoice | None) -> Tensor:
        tensor = self.folder.read(source.name)
        for dim, axis in enumerate(source.axes):
            kept = None if width is None else width.kept(axis, source.layer)
            if kept is not None:
                tensor = tensor.index_select(dim, kept)
        return tensor

    def student_config(self, layers: list[int], dims: Dims) -> dict[str, Any]:
        """config.json of a student with the given layers of the teacher and the given sizes.

        Raises:
            MkdConfigError: transformers or Megatron does not support these layers or sizes.
        """
        if self.folder.vision_language is not None and dims.hidden != self.dims.hidden:
            raise MkdConfigError(
                f"--hidden-size is {dims.hidden}: the projector of {self.folder.vision_language.architecture} writes "
                f"into {self.dims.hidden} channels of the residual stream: leave --hidden-size out"
            )
        known = CONFIG_MAPPING[self.family.model_type]
        config = {**self.folder.config, "num_hidden_layers": len(layers)}
        lists = ("layer_types", "mlp_layer_types", "no_rope_layers")
        if self.args.get("layer_mixers") is not None:
            lists = ("layers_block_type",)
            config.pop("hybrid_override_pattern", None)
        for key in lists:
            if (kinds := getattr(known.from_dict(_loaded(self.folder.config)), key, None)) is not None:
                config[key] = [kinds[layer] for layer in layers]
        if (mixtures := getattr(known.from_dict(_loaded(self.folder.config)), "moe_layers", None)) is not None:
            config["moe_layers"] = [number for number, layer in enumerate(layers) if layer in mixtures]
        if dense := config.get("first_k_dense_replace"):
            config["first_k_dense_replace"] = sum(layer < dense for layer in layers)
        if dims != self.dims:
            written = self.family.hf_config(self.args)
            config |= {key: written[key] for key in _WITHOUT_MAMBA if key in written} | {
                "hidden_size": dims.hidden,
                next((key for key in _FFN_WIDTHS if key in written), _FFN_WIDTHS[-1]): dims.ffn,
                "num_attention_heads": dims.heads,
                "num_key_value_heads": dims.groups,
                "head_dim": dims.head_dim,
            }
        try:
            known.from_dict(_loaded(config))
            self.family.megatron_args(config)
        except (StrictDataclassClassValidationError, MkdCheckpointError) as error:
            reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ")  # earlier lines name a validator
            raise MkdConfigError(
                f"transformers or Megatron does not support this student: {reason}{_possible_widths(dims, self.dims)}"
            ) from error
        return config


def _loaded(value: Any) -> Any:
    """A config.json with floats in place of their names, which transformers writes for infinite ones."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _loaded(inner) for key, inner in value.items()}
    return [_loaded(inner) for inner in value] if isinstance(value, list) else value


def _possible_widths(requested: Dims, teacher: Dims) -> str:
    """Advice for a width that is not a multiple of the heads; empty if it is one."""
    if requested.hidden % requested.heads == 0:
        return ""
    below = requested.hidden // requested.heads * requested.heads
    widths = " or ".join(str(width) for width in (below, below + requested.heads) if 0 < width <= teacher.hidden)
    return f" With {requested.heads} heads give --hidden-size {widths}, or choose other --num-attention-heads."
