"""mkd/job/rollout/samples.py: the end tokens of a student's folder."""

from pathlib import Path

import pytest

from mkd.errors import MkdCheckpointError
from mkd.job.rollout.samples import _generation_config


def test_generation_config_is_optional(tmp_path: Path) -> None:
    assert _generation_config(tmp_path, "--kd-student-hf") == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert _generation_config(tmp_path, "--kd-student-hf") == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": 1'])
def test_a_broken_generation_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(MkdCheckpointError, match=r"--kd-student-hf.*generation_config\.json"):
        _generation_config(tmp_path, "--kd-student-hf")
