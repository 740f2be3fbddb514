"""From a Hugging Face folder to a Megatron checkpoint (torch_dist), in one process on the CPU.

Call `mkd.cpu.activate()` before this module is imported.
"""

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training.arguments import validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import destroy_global_vars, set_global_variables
from megatron.training.initialize import initialize_megatron
from megatron.training.vocab_utils import calculate_padded_vocab_size

from mkd import compat
from mkd.arguments import default_arguments
from mkd.checkpoint.assets import store_assets
from mkd.checkpoint.hf_check import check_tensors, read_architecture
from mkd.checkpoint.hf_folder import HFFolder
from mkd.checkpoint.hf_load import load_hf_weights
from mkd.checkpoint.hf_writer import StagedFolder
from mkd.checkpoint.progress import ByteProgress
from mkd.cpu.flags import set_cpu_values
from mkd.errors import MkdCheckpointError
from mkd.models.gpt import gpt_config


def import_hf(folder: HFFolder, save_dir: Path, dtype: torch.dtype | None = None, flag: str = "--save") -> None:
    """Write `folder` as a Megatron checkpoint that `--load`, `--pretrained-checkpoint` and `--kd-teacher-load` read.

    It is a "release" checkpoint: iteration 0, weights and arguments, no optimizer. Any parallel layout can load it. The
    weights' dtype is fp32 or bf16; by default bf16 if the folder is in bf16, else fp32, so that nothing is rounded.
    Raises `MkdCheckpointError` when the folder is not complete or `save_dir` (given by `flag`) is not free.
    """
    family, architecture = read_architecture(folder)
    check_tensors(folder, family)
    if dtype is None:
        stored = {stored for _, stored in folder.tensors.values()}
        dtype = torch.bfloat16 if stored == {torch.bfloat16} else torch.float32
    with StagedFolder(save_dir, flag) as staged:
        args = _arguments(architecture, dtype, staged.path)
        with _megatron(args):
            config = gpt_config(args)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            chunks = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
            total = sum(param.nbytes for chunk in chunks for param in chunk.parameters())
            with ByteProgress(f"reading {folder.path}", total) as progress:
                load_hf_weights(chunks, folder, tp_rank=0, tp_size=1, on_bytes=progress.advance)
            save_checkpoint(0, chunks, None, None, 0, release=True)
        store_assets(folder, staged.path)


def _arguments(architecture: dict[str, Any], dtype: torch.dtype, save_dir: Path) -> Namespace:
    """Megatron's arguments for a one-rank job that holds the model and saves it."""
    args = default_arguments()
    vars(args).update(architecture)
    args.rank, args.local_rank, args.world_size = 0, 0, 1
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, 1, logging_enabled=False
    )
    args.seq_length = args.max_position_embeddings
    args.micro_batch_size = 1
    args.bf16 = dtype == torch.bfloat16
    args.perform_initialization = False  # every parameter is read from the folder
    args.save, args.save_interval = str(save_dir), 1
    set_cpu_values(args)
    return args


@contextlib.contextmanager
def _megatron(args: Namespace) -> Iterator[None]:
    """Megatron initialized for one rank with `args`, without its printing."""
    compat.use_prebuilt_dataset_helpers()
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        try:
            validate_args(args)
        except (AssertionError, ValueError) as error:
            raise MkdCheckpointError(f"megatron refuses the architecture: {error}") from error
        set_global_variables(args, build_tokenizer=False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        initialize_megatron()
        try:
            yield
        finally:
            destroy_rerun_state_machine()
            destroy_num_microbatches_calculator()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            destroy_global_vars()
