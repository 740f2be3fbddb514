"""Refuses files in a model folder for which another library would wait, or which would take too much memory."""

import stat
from pathlib import Path

from mkd.utils.json_files import MOST_BYTES
from mkd.utils.model_folders.tokenizer_files import TOKENIZER_FILES

_READ_WHOLE = {*TOKENIZER_FILES, "config.json", "generation_config.json", "model.safetensors.index.json"}
"""Files of a model folder that other libraries read as a whole, beside chat templates."""
_TEMPLATES = "additional_chat_templates"
"""Folder in a model folder from which transformers reads further chat templates."""


def require_regular_files(folder: Path) -> None:
    """Check a model folder that another library reads.

    Raises:
        ValueError: naming a pipe, device or socket in it, whose reading could wait forever, or a file that would take
            too much memory.
    """
    folders = [one for one in (folder, folder / _TEMPLATES) if one.is_dir()]
    for path in (path for one in folders for path in sorted(one.iterdir())):
        try:
            state = path.stat()
        except OSError:
            continue
        name = path.relative_to(folder)
        if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
            raise ValueError(f"{name} is not a regular file")
        is_whole = path.name in _READ_WHOLE or path.suffix == ".jinja"
        if is_whole and stat.S_ISREG(state.st_mode) and state.st_size > MOST_BYTES:
            raise ValueError(f"{name} has {state.st_size:,} bytes; at most {MOST_BYTES:,} are read")
