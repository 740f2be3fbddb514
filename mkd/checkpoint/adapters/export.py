"""Exports the adapters of a Megatron checkpoint, as a PEFT folder or merged into the weights under them."""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from mkd.checkpoint.adapters.experts import expert_parameters
from mkd.checkpoint.adapters.merged import MergedFolder
from mkd.checkpoint.adapters.peft_folder import PeftFolder, is_peft_folder, write_peft_folder
from mkd.checkpoint.adapters.stored import StoredAdapters
from mkd.checkpoint.casts import CastCheck
from mkd.checkpoint.hf.export import architecture_of
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.model_card import model_card
from mkd.checkpoint.hf.whole_model import WholeModel, stored_architecture
from mkd.checkpoint.hf.writer import StagedFolder, WeightsWriter, plan_bytes, write_json
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.utils.model_folders.tokenizer_files import TOKENIZER_FILES
from mkd.utils.progress import ByteProgress


def export_peft(
    folder: MegatronFolder, out: Path, dtype: torch.dtype | None = None, base: str | None = None, flag: str = "--hf"
) -> None:
    """Write the adapters of a checkpoint as a PEFT folder, with the tokenizer. The weights under them are not read.

    Args:
        folder: the checkpoint.
        out: a new folder, given by `flag`.
        dtype: of the tensors; None keeps the stored one.
        base: folder of the weights under the adapters, for `base_model_name_or_path`; None: the one of the training.
        flag: the flag to name in messages.

    Raises:
        MkdCheckpointError: `out` is in use, or the checkpoint is damaged.
    """
    folder.check_content()
    with StagedFolder(out, flag) as staged:
        write_peft_files(folder, staged.path, dtype, base)


def write_peft_files(
    folder: MegatronFolder, out: Path, dtype: torch.dtype | None = None, base: str | None = None
) -> None:
    """See `export_peft`; `out` exists."""
    adapters, name = StoredAdapters(folder), base or base_of(folder)
    for layer in adapters.layers:
        adapters.weight_shape(layer)  # raises before memory is taken
    family, _, args = architecture_of(folder)
    whole = stored_architecture(folder)
    write_peft_folder(
        out,
        adapters,
        rank=adapters.options.rank,
        alpha=adapters.options.alpha,
        # A short name would match other layers of the model, too: of routed experts, or of a vision tower.
        has_whole_names=bool(args.get("num_experts")) or whole is not None,
        experts=expert_parameters(family, args) if args.get("num_experts") else {},
        base=os.path.abspath(name) if Path(name).is_dir() else name,
        dtype=dtype,
        named=family.module_name if whole is None else whole.module_name,
    )
    for file in TOKENIZER_FILES:
        if folder.assets_dir and (folder.assets_dir / file).is_file():
            shutil.copyfile(folder.assets_dir / file, out / file)


def write_snapshot(folder: MegatronFolder, out: Path) -> None:
    """Write a PEFT folder on the first rank; see `mkd.checkpoint.hf.snapshot`. Called on all ranks."""
    if dist.get_rank() == 0:
        write_peft_files(folder, out)


def export_merged(
    folder: MegatronFolder, out: Path, dtype: torch.dtype | None = None, base: str | None = None, flag: str = "--hf"
) -> None:
    """Write the weights under the adapters of a checkpoint plus the adapters as a Hugging Face folder.

    One tensor is in memory at a time. See `export_peft` for the arguments.

    Raises:
        MkdCheckpointError: `out` is in use, the checkpoint is damaged, or the folder of the weights under the adapters
            is missing or holds others.
    """
    folder.check_content()
    adapters = StoredAdapters(folder)
    frozen = HFFolder(base or base_of(folder), "--load" if base is None else "--base")
    if (found := frozen.fingerprint()) != folder.base_fingerprint:
        raise folder.error(
            f"its adapters are of the weights with fingerprint {folder.base_fingerprint}, {frozen.path} has {found}: "
            "give the folder that the run began with in --base"
        )
    merged = MergedFolder(frozen, adapters)
    for layer in adapters.layers:
        if merged.adapted_shape(layer) != adapters.weight_shape(layer):
            raise folder.error(f"the adapter of {layer} does not fit {frozen.path}")
    text = {name: (shape, dtype or stored) for name, (shape, stored) in merged.tensors.items()}
    whole = WholeModel(merged)
    plan = whole.plan(text)
    casts = CastCheck(folder.error, "give --dtype bf16 or fp32")
    with StagedFolder(out, flag) as staged, ByteProgress(f"writing {out}", plan_bytes(plan)) as progress:
        writer = WeightsWriter(staged.path, plan)
        for name, (_, wanted) in text.items():
            value = casts.cast(name, merged.read(name), wanted)
            writer.write(whole.stored(name), whole.as_stored(name, value))
            progress.advance(value.nbytes)
        for name, value in whole.carried():
            writer.write(name, value)
            progress.advance(value.nbytes)
        writer.close()
        for file in merged.assets():
            shutil.copyfile(file, staged.path / file.name)
        write_json(staged.path / "config.json", whole.config(next(iter(plan.values()))[1]))
        if (card := model_card(folder, staged.final.name)) is not None:
            (staged.path / "README.md").write_text(card, encoding="utf-8")
    casts.warn()


def base_of(folder: MegatronFolder) -> str:
    """Folder of the weights under the adapters, as the run was given it."""
    name = getattr(folder.args, "kd_student_hf", None)
    if not isinstance(name, str):
        raise folder.error(f"{folder.iteration_dir.name} records no --kd-student-hf: give the folder in --base")
    return str(PeftFolder(name, "--load").base.path) if is_peft_folder(name) else name
