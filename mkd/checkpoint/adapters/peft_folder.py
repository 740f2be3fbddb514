"""PEFT folders: adapters (LoRA) of a model in another folder, read with checks and written.

`target_modules` names linear layers, `target_parameters` parameters: those of routed experts, or the weight of a linear
layer.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.adapters.experts import (
    DOWN,
    GATE_UP,
    UP,
    ExpertParameter,
    expert_parameters,
    from_peft,
    peft_modules,
    peft_shapes,
    to_peft,
)
from mkd.checkpoint.adapters.lora_targets import LoraTargets, is_named
from mkd.checkpoint.adapters.merged import Adapters, MergedFolder
from mkd.checkpoint.adapters.stored import short_names
from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.families.vision_language import text_module_name
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.writer import write_json
from mkd.checkpoint.safetensors_files import read_header, write_tensors
from mkd.checkpoint.tokenizer_hash import hash_hex, read_json_object
from mkd.config.lora import LARGEST_RANK
from mkd.errors import MkdCheckpointError
from mkd.utils.model_folders.hub_folder import download_hint

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_EXPERT_PARAMETERS = (GATE_UP, UP, DOWN)
_NAMES_OF_OLD_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_ABSENT = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
    *("kasa_config", "use_bdlora", "arrow_config", "monteclora_config"),
)
"""Keys of adapter_config.json that change the model beyond W + scale B A of one rank: they must be absent or empty."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the model's own weights alone. PEFT changes them again for the others (pissa,
olora, corda, ...) when it loads a folder."""


def is_peft_folder(path: str | os.PathLike) -> bool:
    """True for a folder with adapters and without a model."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def open_hf_folder(path: str | os.PathLike, flag: str) -> HFFolder:
    """A Hugging Face folder, or a PEFT folder merged with the model under it.

    Raises:
        MkdCheckpointError: see `HFFolder` and `PeftFolder`.
    """
    if not is_peft_folder(path):
        return HFFolder(path, flag)
    folder = PeftFolder(path, flag)
    return MergedFolder(folder.base, folder)


class PeftFolder:
    """A PEFT folder with adapters of linear layers, checked against the model under them; no tensor is read yet."""

    def __init__(self, path: str | os.PathLike, flag: str) -> None:
        """Raises:
        MkdCheckpointError: a file is missing or damaged, the adapters are of a kind that mkd does not compute, they
            do not fit the model that `base_model_name_or_path` names, or are not those of `target_modules`.
        """
        self.path, self.flag = Path(path), flag
        self.config = read_json_object(self.path / CONFIG, flag)
        self._check_config()
        self.rank = self._number("r", 1, LARGEST_RANK, int)
        self.alpha = self._number("lora_alpha", 0.0, 1e9, (int, float))
        self.scale: float = self.alpha / (math.sqrt(self.rank) if self.config.get("use_rslora") else self.rank)
        """See `Adapters`."""
        self.base = HFFolder(self._base_path(), flag)
        if not (self.path / WEIGHTS).is_file():
            raise self.error(f"there is no {WEIGHTS}; adapters in other formats are not read")
        self.entries = read_header(self.path / WEIGHTS, flag)
        self._family, _ = read_architecture(self.base)
        self._experts = self._adapted_experts()
        self._modules: Mapping[str, str] = self._find_layers()
        """Layer -> its name in the file."""
        self.layers: Sequence[str] = sorted(self._modules)
        """See `Adapters`."""
        self._check_targets()

    def error(self, text: str) -> MkdCheckpointError:
        """An error that names the folder and its flag."""
        return MkdCheckpointError(f"{self.flag} {self.path}: {text}")

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """See `Adapters`."""
        a, b = (self.entries[_tensor(self._modules[layer], factor)].read(None, None) for factor in "AB")
        return (a, b) if layer not in self._experts else from_peft(a, b, self._experts[layer])

    def fingerprint(self) -> str:
        """See `Adapters`."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        parts = [repr(self.scale).encode()]
        for name in sorted(self.entries):
            parts += [name.encode(), self.entries[name].read(None, None).reshape(-1).view(torch.uint8).numpy().data]
        return hash_hex(*parts)

    def _check_config(self) -> None:
        if (kind := self.config.get("peft_type")) != "LORA":
            raise self.error(f'{CONFIG}: "peft_type" is {kind!r}; only LORA is read')
        for key in _ABSENT:
            if value := self.config.get(key):
                raise self.error(f'{CONFIG}: "{key}" is {value!r}; mkd has no such adapters')
        if (start := self.config.get("init_lora_weights")) not in _PLAIN_STARTS:
            raise self.error(
                f'{CONFIG}: "init_lora_weights" is {start!r}, with which PEFT also changes the weights under '
                "the adapters: convert them to plain LoRA in PEFT, or give the merged model"
            )
        if (bias := self.config.get("bias", "none")) != "none":
            raise self.error(f'{CONFIG}: "bias" is {bias!r}; only "none" is read')

    def _number(self, key: str, least: float, most: float, kind: Any) -> Any:
        value = self.config.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f'{CONFIG}: "{key}" is {value!r}; a number from {least:g} to {most:g} is needed')
        return value

    def _base_path(self) -> Path:
        """The folder of the model under the adapters: beside the working directory, or beside the PEFT folder."""
        name = self.config.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise self.error(f'{CONFIG}: "base_model_name_or_path" is {name!r}; it must name the folder of the model')
        found = next((path for path in (Path(name), self.path / name) if path.is_dir()), None)
        if found is None:
            raise self.error(
                f'{CONFIG}: "base_model_name_or_path" is {name!r}, which is not a folder here{download_hint(name)}; '
                "write the path of the model's folder there"
            )
        if is_peft_folder(found):
            raise self.error(f'{CONFIG}: "base_model_name_or_path" is {name!r}, a PEFT folder itself: merge it first')
        return found

    def _adapted_experts(self) -> dict[str, ExpertParameter]:
        """The parameters of routed experts that `target_parameters` names."""
        targets = self.config.get("target_parameters") or []
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise self.error(f'{CONFIG}: "target_parameters" is {str(targets)[:80]}; a list of names is needed')
        if not any(name.endswith(tuple(_EXPERT_PARAMETERS)) for name in targets):
            return {}
        ends = tuple(f".{self._layer_name(name)}" for name in targets)
        found = expert_parameters(*read_architecture(self.base))
        return {name: parameter for name, parameter in found.items() if f".{name}".endswith(ends)}

    def _find_layers(self) -> dict[str, str]:
        found: dict[str, set[str]] = {}
        modules: dict[str, str] = {}
        parameters = {module: name for name, module in peft_modules(self._experts).items()}
        for name, entry in self.entries.items():
            match = _NAME.fullmatch(name)
            if match is None or not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
                raise self.error(f"tensor {name} is not a factor of a linear layer's adapter")
            module, factor = match[1], match[2]
            layer = self._layer_name(module)
            layer = parameters.get(layer, layer)
            if modules.setdefault(layer, module) != module:
                raise self.error(f"{module} and {modules[layer]} are the same layer of {self.base.path}")
            if entry.shape != (needed := self._shapes(layer, name)[factor]):
                raise self.error(f"tensor {name} has shape {list(entry.shape)}, {list(needed)} fits {self.base.path}")
            found.setdefault(layer, set()).add(factor)
        for layer, factors in found.items():
            if len(factors) < 2:
                raise self.error(f"{layer} has lora_{factors.pop()} alone")
        if not found:
            raise self.error(f"{WEIGHTS} has no adapters")
        return modules

    def _check_targets(self) -> None:
        """Refuse "target_modules" that do not agree with the tensors: PEFT adapts the layers that it names, and leaves
        tensors of other layers out."""
        parameters = self.config.get("target_parameters") or []
        plain = [
            module
            for layer, module in self._modules.items()
            if layer not in self._experts and not any(is_named(f"{module}.weight", name) for name in parameters)
        ]
        targets = LoraTargets.read(self.config, self.error)
        if missing := next((module for module in plain if not targets.has(module)), None):
            raise self.error(
                f"{WEIGHTS} has an adapter of {missing}, and PEFT leaves it out with {targets.description} in "
                f"{CONFIG}: restore the values with which the folder was saved"
            )
        # transformers 5 keeps routed experts in one parameter, which is no layer that PEFT could adapt.
        layers = [
            name.removesuffix(".weight")
            for name, (shape, _) in self.base.tensors.items()
            if len(shape) == 2 and ".experts." not in name
        ]
        for name in targets.names:
            if not any(is_named(module, name) for module in self._modules.values()) and any(
                is_named(layer, name) and targets.has(layer) for layer in layers
            ):
                raise self.error(
                    f'{CONFIG}: "target_modules" has {name}, and {WEIGHTS} no adapter of such a layer: restore the '
                    "values with which the folder was saved"
                )

    def _layer_name(self, module: str) -> str:
        """The beginning of the names of a module's tensors in the folder of the model."""
        return self._family.layer_name(module if self.base.vision_language is None else text_module_name(module))

    def _shapes(self, layer: str, tensor: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the A and B of a layer in the file; `tensor` is for messages."""
        if layer in self._experts:
            return peft_shapes(self._experts[layer], self.rank)
        weight = self.base.tensors.get(f"{layer}.weight")
        if weight is None or len(weight[0]) != 2:
            where = "" if self.base.vision_language is None else "the text model of "
            hint = ""
            if layer.removesuffix(".base_layer").endswith(".experts"):
                hint = f'; {CONFIG} names no parameter of these experts in "target_parameters"'
            raise self.error(f"tensor {tensor}: {where}{self.base.path} has no linear layer {layer}{hint}")
        out, inputs = weight[0]
        return {"A": (self.rank, inputs), "B": (out, self.rank)}


def _tensor(layer: str, factor: str) -> str:
    return f"base_model.model.{layer}.lora_{factor}.weight"


def write_peft_folder(
    out: Path,
    adapters: Adapters,
    *,
    rank: int,
    alpha: float,
    base: str,
    experts: Mapping[str, ExpertParameter] = MappingProxyType({}),
    has_whole_names: bool = False,
    dtype: torch.dtype | None = None,
    named: Callable[[str], str] = str,
) -> None:
    """Write adapters into an existing folder.

    Args:
        out: the folder.
        adapters: the adapters.
        rank: rows of every A.
        alpha: the scale times the rank.
        base: PEFT's `base_model_name_or_path`.
        experts: the parameters of the model's routed experts.
        has_whole_names: name the layers with the path to them, because others have the same names.
        dtype: of the tensors; None keeps it.
        named: from the name of a layer in folders to that of transformers' module.
    """
    tensors: dict[str, Tensor] = {}
    adapted = {name: experts[name] for name in adapters.layers if name in experts}
    modules = {name: name for name in adapters.layers} | peft_modules(adapted)
    for layer in adapters.layers:
        a, b = adapters.factors(layer)
        if layer in adapted:
            a, b = to_peft(a, b, adapted[layer])
        for factor, value in zip("AB", (a, b), strict=True):
            tensors[_tensor(named(modules[layer]), factor)] = value if dtype is None else value.to(dtype)
    write_tensors(out / WEIGHTS, tensors)
    linear = [layer for layer in adapters.layers if layer not in adapted]
    # PEFT takes the names of experts' matrices in transformers 4 for the experts, wherever they are in a mixture.
    taken = [layer for layer in linear if experts and layer.rpartition(".")[2] in _NAMES_OF_OLD_EXPERTS]
    parameters = sorted([*map(named, adapted), *(f"{named(layer)}.weight" for layer in taken)])
    linear = [layer for layer in linear if layer not in taken]
    names = sorted(map(named, linear)) if has_whole_names else short_names(linear)
    write_json(out / CONFIG, peft_config(rank, alpha, names, base, parameters))


def peft_config(
    rank: int, alpha: float, modules: Sequence[str], base: str, parameters: Sequence[str] = ()
) -> Mapping[str, Any]:
    """The content of adapter_config.json."""
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": list(modules),
        **({"target_parameters": list(parameters)} if parameters else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
