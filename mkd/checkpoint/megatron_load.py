"""From a Megatron `torch_dist` checkpoint into the parameters of a frozen model, whatever layout it was saved in."""

from collections.abc import Sequence

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mkd.checkpoint.megatron_folder import MegatronFolder


def load_megatron_weights(chunks: Sequence[nn.Module], folder: MegatronFolder) -> None:
    """Fill every parameter of this rank's only model chunk from the checkpoint's model weights.

    Raises:
        MkdCheckpointError: a parameter is missing in the checkpoint or has another shape there.
    """
    (chunk,) = chunks
    model = unwrap_model(chunk)
    path = str(folder.iteration_dir)
    wanted = model.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata(path))
    wanted = {key: value for key, value in wanted.items() if not key.endswith("_extra_state")}
    try:
        loaded = dist_checkpointing.load(wanted, path, strict=StrictHandling.RAISE_UNEXPECTED)
    except (CheckpointingException, CheckpointException, KeyError, ValueError, RuntimeError) as error:
        raise folder.error(f"the weights do not load ({error})") from error
    missing, _ = model.load_state_dict(loaded, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing:
        raise folder.error(f"no weights for {', '.join(missing)}")
