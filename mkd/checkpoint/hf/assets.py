"""Copies configuration and tokenizer of a Hugging Face model beside the iterations of a Megatron checkpoint."""

import os
from pathlib import Path

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.tokenizer_files import ASSETS
from mkd.utils.atomic_files import copy_file


def store_assets(folder: HFFolder, save_dir: str | os.PathLike) -> None:
    """Copy config.json, generation config, tokenizer and chat template into `save_dir/hf_assets`.

    With these files an export does not need the original folder, and the stored tokenizer can be compared. Each file is
    replaced atomically. Call it on one rank.
    """
    target = Path(save_dir) / ASSETS
    target.mkdir(parents=True, exist_ok=True)
    for source in folder.assets():
        copy_file(source, target / source.name)
