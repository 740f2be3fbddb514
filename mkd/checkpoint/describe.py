"""Summary of a Hugging Face folder or a Megatron checkpoint, without reading weights."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mkd.checkpoint.adapters.peft_folder import PeftFolder, is_peft_folder
from mkd.checkpoint.adapters.stored import StoredAdapters, short_names
from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.export import MODEL_KEYS, architecture_of
from mkd.checkpoint.hf.families.vision_language import VisionLanguage
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.whole_model import stored_architecture
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.config.megatron.arg_names import labels
from mkd.errors import MkdCheckpointError
from mkd.models.lora import KEY_PREFIX


def describe(hf: str | None, load: str | None) -> dict[str, str]:
    """Label -> value of the content of a folder; exactly one of the two is given.

    Raises:
        MkdCheckpointError: the folder is missing or incomplete, or contradicts its configuration.
    """
    if hf is None:
        return _describe_megatron(MegatronFolder(load, "--load"))
    return _describe_peft(PeftFolder(hf, "--hf")) if is_peft_folder(hf) else _describe_hf(HFFolder(hf, "--hf"))


def _describe_hf(folder: HFFolder) -> dict[str, str]:
    family, args = read_architecture(folder)
    check_tensors(folder, family)
    return {
        "format": "Hugging Face folder",
        "architecture": _architecture(family.architectures[0], folder.vision_language),
        **_sizes(args),
        "weights": _weights(folder.tensors.values()),
        **_carried(folder),
        "tokenizer": folder.tokenizer_hash() or "none",
        "fingerprint": folder.fingerprint(),
    }


def _architecture(family: str, known: VisionLanguage | None) -> str:
    return family if known is None else f"{family}, the text model of {known.architecture}"


def _carried(folder: HFFolder) -> dict[str, str]:
    """Weights beside the text model; empty without any."""
    if not folder.carried:
        return {}
    return {"carried over": _weights((entry.shape, entry.dtype) for entry in folder.carried.values())}


def _describe_peft(folder: PeftFolder) -> dict[str, str]:
    return {
        "format": "PEFT folder",
        "adapters": f"rank {folder.rank}, scale {folder.scale:g}, on {' '.join(short_names(folder.layers))}",
        "weights": _weights((entry.shape, entry.dtype) for entry in folder.entries.values()),
        "fingerprint": folder.fingerprint(),
        "base": str(folder.base.path),
        **{f"base's {name}": value for name, value in _describe_hf(folder.base).items() if name != "format"},
    }


def _describe_adapters(folder: MegatronFolder) -> dict[str, str]:
    """Adapters and the weights under them; empty for a checkpoint of whole weights."""
    if folder.base_fingerprint is None:
        return {}
    stored = StoredAdapters(folder)
    return {
        "adapters": f"{stored.options}, on {' '.join(stored.modules)}",
        "base": f"{getattr(folder.args, 'kd_student_hf', None)}, fingerprint {folder.base_fingerprint}",
    }


def _describe_megatron(folder: MegatronFolder) -> dict[str, str]:
    try:
        architecture = _architecture(architecture_of(folder)[0].architectures[0], stored_architecture(folder))
    except MkdCheckpointError as error:
        architecture = f"no Hugging Face architecture ({error})"
    try:
        sizes = _sizes(vars(folder.args))
    except LookupError as error:
        raise folder.error(f"{folder.iteration_dir.name} stores no argument {error}") from error
    stored = folder.metadata.state_dict_metadata
    tensors = {key: value for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}
    model = {key: value for key, value in tensors.items() if key.startswith((*MODEL_KEYS, KEY_PREFIX))}
    return {
        "format": f"Megatron checkpoint, torch_dist, {folder.iteration_dir.name}",
        "architecture": architecture,
        **sizes,
        "weights": _weights((tuple(value.size), value.properties.dtype) for value in model.values()),
        **_describe_adapters(folder),
        "other tensors": f"{len(tensors) - len(model)} (such as optimizer state)",
        "hf_assets": "yes" if folder.assets_dir else "no: an export will have no tokenizer",
        "tokenizer": folder.tokenizer_hash() or "none",
        "fingerprint": folder.fingerprint(),
    }


def _sizes(args: Mapping[str, Any]) -> dict[str, str]:
    sizes = {text: args.get(name) for name, text in labels().items()}
    if not args.get("group_query_attention"):
        sizes["key-value heads"] = args["num_attention_heads"]
    if not args.get("num_experts"):
        sizes["experts per token"] = None
    sizes["embeddings"] = "own LM head" if args["untie_embeddings_and_output_weights"] else "tied"
    return {text: str(value) for text, value in sizes.items() if value is not None}


def _weights(tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    numbers: Counter[torch.dtype] = Counter()
    for shape, dtype in tensors:
        numbers[dtype] += torch.Size(shape).numel()
    listed = ", ".join(f"{count / 1e6:,.1f}M {str(dtype).removeprefix('torch.')}" for dtype, count in numbers.items())
    return f"{listed}, {sum(count * dtype.itemsize for dtype, count in numbers.items()) / 1e9:.2f} GB"
