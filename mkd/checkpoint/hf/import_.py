"""Converts a Hugging Face folder to a Megatron checkpoint (torch_dist), on the CPU, one parameter in memory at a time.

Under torchrun, each rank reads and writes its share of the parameters.
Call `mkd.cpu.activate()` before this module is imported.
"""

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training.arguments import validate_args
from megatron.training.vocab_utils import calculate_padded_vocab_size
from torch import Tensor

from mkd.checkpoint.casts import CastCheck
from mkd.checkpoint.hf.check import check_tensors, read_architecture, report_left_out
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import HFFolder, store_assets
from mkd.checkpoint.hf.layouts import TensorShard
from mkd.checkpoint.hf.load import read_item
from mkd.checkpoint.hf.tables import Item
from mkd.checkpoint.hf.writer import StagedFolder
from mkd.checkpoint.megatron.folder import TRACKER
from mkd.checkpoint.megatron.lazy_save import LazyTensors, save
from mkd.checkpoint.ranks import all_ranks
from mkd.config.flags import default_arguments
from mkd.cpu.flags import set_cpu_values
from mkd.errors import MkdCheckpointError
from mkd.utils.progress import ByteProgress


def import_hf(folder: HFFolder, save_dir: Path, dtype: torch.dtype | None = None) -> None:
    """Write `folder` as a Megatron checkpoint for `--load`, `--pretrained-checkpoint` and `--kd-teacher-load`.

    It is a "release" checkpoint: iteration 0, weights and arguments, no optimizer. Any parallel layout can load it. The
    dtype is fp32 or bf16; the default is bf16 if the folder is in bf16, else fp32, so that nothing is rounded.

    Raises:
        MkdCheckpointError: the folder is not complete, or `save_dir` (--save) is not free.
    """
    family, architecture = read_architecture(folder)
    check_tensors(folder, family)
    report_left_out(folder, family)
    if dtype is None:
        wide = {name for item in family.tensors(architecture) if item.entry.in_fp32 for name in item.shapes}
        stored = {stored for name, (_, stored) in folder.tensors.items() if name not in wide}
        dtype = torch.bfloat16 if stored == {torch.bfloat16} else torch.float32
    args = _arguments(architecture, dtype, save_dir)
    staged = StagedFolder(save_dir, "--save")
    with all_ranks() as (rank, size), staged if rank == 0 else contextlib.nullcontext():
        release = staged.path / "release"
        if rank == 0:
            release.mkdir()
        dist.barrier()
        items = list(_parameters(family, architecture))[rank::size]
        total = sum(torch.Size(_full_shape(item, args)).numel() for item in items) * dtype.itemsize
        # The ranks have equal shares, so the progress of rank 0 stands for all.
        progress = ByteProgress(f"reading {folder.path}", total) if rank == 0 else None
        with progress or contextlib.nullcontext():
            on_bytes = progress.advance if progress else lambda nbytes: None
            tensors = _lazy_tensors(folder, family, items, args, dtype, on_bytes)
            save(release, {"args": args, "checkpoint_version": 3.0, "iteration": 0}, tensors)
        if rank == 0:
            (staged.path / TRACKER).write_text("release")
            store_assets(folder, staged.path)


def _parameters(family: Family, architecture: dict[str, Any]) -> Iterator[Item]:
    """Parameters that a checkpoint of the model stores; a tied LM head is the embedding and is not stored again."""
    tied = set() if architecture["untie_embeddings_and_output_weights"] else set(family.tied)
    return (item for item in family.tensors(architecture) if not tied.issuperset(item.shapes))


def _full_shape(item: Item, args: Namespace) -> tuple[int, ...]:
    """Shape of the unsharded parameter: the rows of its Hugging Face tensors, or those of the padded vocabulary."""
    if item.shape:
        return item.shape
    first, *rest = item.shapes.values()
    rows = args.padded_vocab_size if item.layer is None and len(first) > 1 else first[0] + sum(s[0] for s in rest)
    return (rows, *first[1:])


def _lazy_tensors(
    folder: HFFolder,
    family: Family,
    items: list[Item],
    args: Namespace,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None],
) -> LazyTensors:
    dims = family.dims(vars(args))
    casts = CastCheck(folder.error, "give --dtype fp32")

    def read(item: Item, shape: tuple[int, ...], dtype: torch.dtype, section: slice) -> Tensor:
        value = read_item(folder, item, dims, TensorShard(0, 1), shape, tied={})[section]
        value = casts.cast(item.name, value, dtype)
        on_bytes(value.nbytes)
        return value

    tensors = LazyTensors()
    for item in items:
        shape, kept = _full_shape(item, args), torch.float32 if item.entry.in_fp32 else dtype
        for key, axes in item.saved_keys():
            indices = tuple((index, vars(args)[argument]) for argument, index in axes)
            first = 0
            for name, rows in zip(item.stored_tensors(key), item.sections.values() or shape[:1], strict=True):
                block, section = (rows, *shape[1:]), slice(first, first + rows)
                tensors.add(name, block, kept, partial(read, item, shape, kept, section), indices)
                first += rows
    return tensors


def _arguments(architecture: dict[str, Any], dtype: torch.dtype, save_dir: Path) -> Namespace:
    """Megatron's arguments of a one-rank job that holds the model and saves it."""
    args = default_arguments()
    vars(args).update(architecture)
    args.rank, args.local_rank, args.world_size = 0, 0, 1
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, 1, logging_enabled=False
    )
    args.seq_length = args.max_position_embeddings
    args.micro_batch_size = 1
    args.bf16 = dtype == torch.bfloat16
    args.save, args.save_interval = str(save_dir), 1
    set_cpu_values(args)
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        try:
            validate_args(args)
        except (AssertionError, ValueError) as error:
            raise MkdCheckpointError(f"megatron refuses the architecture: {error}") from error
    return args
