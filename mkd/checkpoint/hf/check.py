"""Checks that a Hugging Face folder holds the model that its config.json describes, from headers alone.

Only one check reads weights: a stored copy of a tied embedding must be equal to the embedding.
"""

from typing import Any

import torch

from mkd.checkpoint.hf.families import Family, family_of
from mkd.checkpoint.hf.folder import HFFolder
from mkd.errors import MkdCheckpointError
from mkd.utils.logging import logger

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_architecture(folder: HFFolder) -> tuple[Family, dict[str, Any]]:
    """The folder's family and its Megatron arguments.

    Raises:
        MkdCheckpointError: naming the folder, the key and the family, when a value in config.json is missing or
            not supported.
    """
    family, whole = None, folder.vision_language
    try:
        family = family_of(folder.config)
        return family, family.megatron_args(folder.config)
    except MkdCheckpointError as error:
        parts = [] if whole is None else [f"text model of {whole.architecture}"]
        parts += [] if family is None else [f"read as {family.architectures[0]}"]
        where = f" ({'; '.join(parts)})" if parts else ""
        raise folder.error(f"{error}{where}") from error


def check_tensors(folder: HFFolder, family: Family) -> None:
    """Check that the folder holds exactly the tensors that its config.json implies.

    Raises:
        MkdCheckpointError: naming a tensor that is missing, unknown, of another shape, or not stored in a
            floating-point type.
    """
    args = family.megatron_args(folder.config)
    expected = {name: shape for item in family.tensors(args) for name, shape in item.shapes.items()}
    optional = set() if args["untie_embeddings_and_output_weights"] else set(family.tied)
    for name, shape in expected.items():
        if name not in folder.tensors:
            if name in optional:
                continue
            if f"{name}_blocks" in folder.tensors:
                raise folder.error(
                    f"tensor {name} is stored as MXFP4 blocks; quantized weights are not read: load the model with "
                    "transformers' Mxfp4Config(dequantize=True) and save it"
                )
            raise folder.error(f"tensor {name} of shape {list(shape)} is missing")
        found, dtype = folder.tensors[name]
        if found != shape:
            raise folder.error(f"tensor {name} has shape {list(found)}, config.json implies {list(shape)}")
        if dtype not in _WEIGHT_DTYPES:
            raise folder.error(f"tensor {name} is stored as {dtype}; quantized weights are not read")
    for name in folder.tensors:
        if name not in expected and not name.endswith(family.ignored) and not name.startswith(family.left_out):
            raise folder.error(f"tensor {name} is not part of {family.architectures[0]}")
    for name in optional & folder.tensors.keys():
        if not folder.are_equal(name, family.tied[name]):
            raise folder.error(
                f'tensor {name} differs from {family.tied[name]}, but config.json has "tie_word_embeddings": true'
            )


def left_out_names(folder: HFFolder, family: Family) -> list[str]:
    """Names of a folder's tensors that are weights of heads for multi-token prediction."""
    return [name for name in folder.tensors if family.left_out and name.startswith(family.left_out)]


def report_left_out(folder: HFFolder, family: Family) -> None:
    """Print which weights of a folder are not read, and thus are in no export."""
    names = left_out_names(folder, family)
    if names:
        logger.info(
            f"{folder.path}: {len(names)} tensors {' and '.join(f'{start}*' for start in family.left_out)} (heads for "
            "multi-token prediction) are left out, as transformers does; mkd convert export --mtp copies them"
        )
