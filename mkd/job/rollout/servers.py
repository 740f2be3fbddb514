"""Inference servers that write the student's texts (--kd-rollout-url): finding them, and what they are given."""

from argparse import Namespace
from pathlib import Path

from mkd.checkpoint.adapters.peft_folder import open_hf_folder
from mkd.checkpoint.hf.folder import store_assets
from mkd.checkpoint.live_export import LiveModel
from mkd.checkpoint.tokenizer_hash import ASSETS
from mkd.config.kd_config import KDConfig
from mkd.job.teachers.common import WITHOUT_WAITING_S
from mkd.job.teachers.inference import probe_text
from mkd.rollout.served.find import TextSizes, addresses_of, find_servers
from mkd.rollout.served.text_files import TextFiles
from mkd.rollout.served.weights import WeightFolders
from mkd.rollout.served.writer import ServedWriter
from mkd.teacher.inference.http import ROLLOUT
from mkd.utils.logging import current_rank

_KNOWN_TOKENS = 64
"""Tokens of the text by which the weights of servers are compared with the student's."""


def served_writer(args: Namespace, kd: KDConfig, sizes: TextSizes, waits: bool) -> ServedWriter | None:
    """The writer of --kd-rollout-url; None without the flag. The first rank finds the servers.

    Raises:
        MkdTeacherError: they cannot be used.
    """
    if kd.rollout_url is None:
        return None
    addresses_of(kd)
    is_first, timeout_s = current_rank() == 0, kd.rollout_timeout if waits else WITHOUT_WAITING_S
    text, _ = probe_text(args, sizes.vocab)
    folder, saves = rollout_folder(args, kd), args.save is not None and args.save_interval
    return ServedWriter(
        servers=find_servers(kd, sizes, timeout_s) if is_first else [],
        folders=WeightFolders(folder),
        model=LiveModel(args, _assets_dir(args, kd), ROLLOUT.url),
        text=text[:_KNOWN_TOKENS],
        refresh=kd.rollout_refresh,
        timeout_s=kd.rollout_timeout,
        files=None if not saves else TextFiles(folder, args.save_interval),
    )


def rollout_folder(args: Namespace, kd: KDConfig) -> Path:
    """Folder of the weights for the servers of --kd-rollout-url."""
    return Path(kd.rollout_weights or Path(args.save) / "rollout")


def _assets_dir(args: Namespace, kd: KDConfig) -> Path | None:
    """The folder with the Hugging Face configuration and tokenizer of the student; None without one."""
    if kd.student_hf is not None:
        return rollout_folder(args, kd) / ASSETS
    folders = [Path(folder) / ASSETS for folder in (args.load, args.pretrained_checkpoint) if folder is not None]
    return next((folder for folder in folders if folder.is_dir()), None)


def store_rollout_assets(args: Namespace, kd: KDConfig) -> None:
    """Copy the student's configuration and tokenizer for the servers of --kd-rollout-url. Call it on one rank."""
    if kd.rollout_url is not None and kd.student_hf is not None:
        store_assets(open_hf_folder(kd.student_hf, "--kd-student-hf"), rollout_folder(args, kd))
