"""The rest of an error about a folder of the other format: a Megatron checkpoint in place of a Hugging Face folder, or
the reverse."""

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""File of a Megatron checkpoint folder that names the current iteration."""
CONFIG = "config.json"
"""File of a Hugging Face folder with the architecture."""
_MEGATRON_FLAGS = {"--kd-teacher-hf": "--kd-teacher-load", "--kd-student-hf": "--pretrained-checkpoint"}
_HF_FLAGS = {megatron: hf for hf, megatron in _MEGATRON_FLAGS.items()}


def megatron_hint(path: Path, flag: str) -> str:
    """The remedy if a Hugging Face folder is wanted and `path`, which `flag` names, is a Megatron checkpoint; else
    empty."""
    if not (path / TRACKER).is_file():
        return ""
    convert = f"mkd convert export --load {path} --hf DIR makes a Hugging Face folder of it"
    return f"; it is a Megatron checkpoint: {_given_in(_MEGATRON_FLAGS.get(flag)) or convert}"


def hf_hint(path: Path, flag: str) -> str:
    """The remedy if a Megatron checkpoint is wanted and `path`, which `flag` names, is a Hugging Face folder; else
    empty."""
    if not (path / CONFIG).is_file():
        return ""
    convert = f"mkd convert import --hf {path} --save DIR makes a Megatron checkpoint of it"
    return f"; it is a Hugging Face folder: {_given_in(_HF_FLAGS.get(flag)) or convert}"


def _given_in(flag: str | None) -> str:
    return f"give it in {flag}" if flag else ""
