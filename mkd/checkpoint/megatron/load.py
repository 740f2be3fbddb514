"""Loads a Megatron `torch_dist` checkpoint, saved in any layout, into the parameters of a frozen model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mkd.checkpoint.casts import count_not_finite, listed, name_of
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.compat.unpickling import allowed_classes_only


def load_megatron_weights(chunks: Sequence[nn.Module], folder: MegatronFolder) -> None:
    """Fill every parameter of this rank's only model chunk from the checkpoint's model weights.

    Raises:
        MkdCheckpointError: a parameter is missing in the checkpoint, has another shape there, or has values that are
            not finite in the model's dtype.
    """
    (chunk,) = chunks
    model = unwrap_model(chunk)
    path = str(folder.iteration_dir)
    with allowed_classes_only():
        content = dist_checkpointing.load_content_metadata(path)
    requested = model.sharded_state_dict(metadata=content)
    requested = {key: value for key, value in requested.items() if not key.endswith("_extra_state")}
    rename_to_stored_norms(requested, folder)
    try:
        with allowed_classes_only():
            loaded = dist_checkpointing.load(requested, path, strict=StrictHandling.RAISE_UNEXPECTED)
    except (CheckpointingException, CheckpointException, KeyError, ValueError, RuntimeError) as error:
        raise folder.error(f"the weights do not load ({error})") from error
    missing, _ = model.load_state_dict(loaded, strict=False)
    if counts := count_not_finite(model.named_parameters()):
        raise folder.error(_infinite(counts, next(model.parameters()).dtype))
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing:
        raise folder.error(f"no weights for {', '.join(missing)}")


def _infinite(counts: Mapping[str, int], dtype: torch.dtype) -> str:
    """A message about values that are not finite in a model's dtype."""
    found = f"{listed(counts)} are not finite in {name_of(dtype)}"
    if dtype == torch.float32:
        return f"{found}: its training overflowed"
    return (
        f"{found}: if the checkpoint stores them in a wider dtype, give --kd-teacher-dtype bf16 or fp32; otherwise its "
        "training overflowed"
    )


# The norm before a mixture of experts, as megatron-core 0.19 saves it from Transformer Engine's and from local layers
_MOE_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def rename_to_stored_norms(requested: dict[str, Any], folder: MegatronFolder) -> None:
    """Request a norm under the name that the checkpoint stores, where it was saved from layers of the other kind.

    Args:
        requested: sharded state dict to load; the keys of its tensors are changed in place.
        folder: the checkpoint.
    """
    stored = folder.metadata.state_dict_metadata
    for value in requested.values():
        for own, other in (_MOE_NORM, _MOE_NORM[::-1]):
            if isinstance(value, ShardedTensor) and value.key.endswith(own) and value.key not in stored:
                renamed = value.key.removesuffix(own) + other
                if renamed in stored:
                    value.key = renamed
