"""Folders that transformers reads: pipes and oversized files are refused before."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers.utils import CHAT_TEMPLATE_DIR

from mkd.utils.model_folders.regular_files import require_regular_files


def test_folders_that_other_libraries_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("nowhere")
    require_regular_files(tmp_path)
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not a regular file"):
        require_regular_files(tmp_path)


def test_further_templates_are_regular_files(tmp_path: Path) -> None:
    assert CHAT_TEMPLATE_DIR == "additional_chat_templates"
    (tmp_path / CHAT_TEMPLATE_DIR).mkdir()
    os.mkfifo(tmp_path / CHAT_TEMPLATE_DIR / "tools.jinja")
    with pytest.raises(ValueError, match=r"additional_chat_templates/tools.jinja is not a regular file"):
        require_regular_files(tmp_path)


@pytest.mark.parametrize(("name", "is_read"), [("tokenizer.json", True), ("a.jinja", True), ("data.json", False)])
def test_files_that_other_libraries_read_whole_are_bounded(tmp_path: Path, name: str, is_read: bool) -> None:
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes") if is_read else nullcontext():
        require_regular_files(tmp_path)
