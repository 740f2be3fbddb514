"""run.yaml: it holds what repeats a run, and no secret."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

import mkd
from mkd.config.command_words import words_of
from mkd.config.run_file import read_file
from mkd.job import run_record
from mkd.job.run_record import FILE as RUN_FILE
from mkd.job.run_record import SETTINGS, RunRecord, data_state, run_file, source_hash, without_secrets
from mkd.utils.commit import FILE, commit_of

FLAGS = ["--kd-ratio", "0.5", "--bf16", "--kd-teacher-hf", "a", "b", "--lr", "1e-4"]


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """Arguments of a job with one token file and one chat file."""
    for name in ("p.bin", "p.idx", "chats.jsonl"):
        (tmp_path / name).write_bytes(name.encode())
    data = ["1", str(tmp_path / "p"), "1", str(tmp_path / "chats.jsonl")]
    paths = dict.fromkeys(("data_args_path", "train_data_path", "valid_data_path", "test_data_path"))
    paths |= {"per_split_data_args_path": None, "data_path": data}
    return Namespace(world_size=2, mock_data=False, fim_data=False, **paths)


def test_it_holds_flags_versions_and_data(args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mkd train", "--kd-config", "x.yaml", *FLAGS])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MKD_SERVER_TOKEN", "secret-of-server")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-wandb")
    text = run_file(args, "fingerprint")
    (tmp_path / "run.yaml").write_text(text)
    assert "secret-of" not in text
    assert words_of(read_file(str(tmp_path / "run.yaml"))) == FLAGS
    about = yaml.safe_load(text)["about"]
    assert about["ranks"] == 2
    assert about["environment"]["NCCL_DEBUG"] == "INFO"
    assert about["teacher"] == "fingerprint"
    assert {"python", "torch", "megatron-core", "transformers"} <= about["versions"].keys()
    assert [Path(name).name for name in about["data"]] == ["p.bin", "p.idx", "chats.jsonl"]


def texts_of(job: str) -> dict[str, str]:
    return {SETTINGS: f"settings {job}", RUN_FILE: f"flags {job}"}


def records_in(folder: Path) -> dict[str, str]:
    """File -> job of all records; no other file is there."""
    return {path.name: path.read_text().split()[-1] for path in folder.iterdir()}


def test_each_job_keeps_the_file_before(args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lr in ("1", "2", "3"):
        monkeypatch.setattr(sys, "argv", ["mkd train", "--lr", lr])
        record = RunRecord.write(tmp_path, {RUN_FILE: run_file(args, None)})
        record.exchange()
        record.exchange()  # after the second step
    kept = {path.name: words_of(read_file(str(path)))[-1] for path in tmp_path.glob("run*.yaml")}
    assert kept == {"run-1.yaml": "1", "run-2.yaml": "2", "run.yaml": "3"}


def test_a_job_without_a_step_does_not_replace_the_record(tmp_path: Path) -> None:
    first = RunRecord.write(tmp_path, texts_of("a"))
    assert records_in(tmp_path) == {"run.yaml": "a", "kd_config.json": "a"}
    first.exchange()
    RunRecord.write(tmp_path, texts_of("b"))  # ends, or is killed, without a step
    kept = {"run.yaml": "a", "kd_config.json": "a", "run-1.yaml": "b", "kd_config-1.json": "b"}
    assert records_in(tmp_path) == kept
    RunRecord.write(tmp_path, texts_of("c")).exchange()
    kept |= {"run.yaml": "c", "kd_config.json": "c", "run-2.yaml": "a", "kd_config-2.json": "a"}
    assert records_in(tmp_path) == kept


def test_a_record_of_one_file_only(tmp_path: Path) -> None:
    """Versions before had no kd_config-1.json; a user may have removed a file."""
    (tmp_path / "run.yaml").write_text("flags a")
    (tmp_path / "run-1.yaml").write_text("flags z")
    RunRecord.write(tmp_path, texts_of("b")).exchange()
    kept = {"run-1.yaml": "z", "run-2.yaml": "a", "run.yaml": "b", "kd_config.json": "b"}
    assert records_in(tmp_path) == kept


@pytest.mark.parametrize("writes", range(1, 7))
def test_no_record_is_lost_if_the_exchange_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], writes: int
) -> None:
    RunRecord.write(tmp_path, texts_of("a"))
    record = RunRecord.write(tmp_path, texts_of("b"))
    write, count = run_record._write, 0

    def failing(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count == writes:
            raise OSError("full")
        write(path, text)

    monkeypatch.setattr(run_record, "_write", failing)
    record.exchange()
    found = {path.read_text() for path in tmp_path.iterdir()}
    assert found == {*texts_of("a").values(), *texts_of("b").values()}
    assert "run.yaml is possibly not that of this job (full): see run-1.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "is_kept"),
    [
        ("wandb-api-key", "x", False),
        ("hub-token", "x", False),
        ("proxy-password-file", "x", False),
        ("WANDB_API_KEY", "x", False),
        ("kd-mlflow-uri", "https://user:pass@host/x", False),
        ("kd-mlflow-uri", "https://host/x?access_token=1", False),
        ("wandb-entity", "0123456789abcdef0123456789abcdef01234567", False),
        ("data-path", ["0.5", "hf_abcdefghijklmnopqrst"], False),
        ("kd-mlflow-uri", "https://host:5000/x", True),
        ("tokenizer-model", "folder", True),
        ("moe-token-dispatcher-type", "alltoall", True),
        ("calculate-per-token-loss", True, True),
        ("kd-teacher-hf", "hub/models--x/snapshots/0123456789abcdef0123456789abcdef01234567", True),
    ],
)
def test_secrets_are_left_out(name: str, value: str | bool | list[str], is_kept: bool) -> None:
    kept, left_out = without_secrets({name: value})
    assert (kept == {name: value}, left_out == [name]) == (is_kept, not is_kept)


def test_left_out_flags_are_listed(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mkd train", "--lr", "1", "--kd-mlflow-uri", "http://me:mine@host"])
    text = run_file(args, None)
    assert "mine" not in text
    assert yaml.safe_load(text)["about"]["left_out"] == ["kd-mlflow-uri"]


def test_hash_of_data_depends_on_its_content(tmp_path: Path) -> None:
    path = tmp_path / "data"
    states = set()
    for content in (b"", b"a" * 100_000, b"a" * 99_999 + b"b", b"b" + b"a" * 99_999):
        path.write_bytes(content)
        states.add(data_state(path))
    assert len(states) == 4
    assert data_state(path, hashed=False) == "100000 bytes"


def test_commit_is_that_of_the_package_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]
    package = tmp_path / "venv/mkd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert commit_of(package) == "unknown"  # no checkout
    (tmp_path / "README").write_text("")
    for command in (["init", "-q"], ["add", "README"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *command], check=True)
    assert commit_of(package) == "unknown"  # in a checkout of something else
    for command in (["add", "."], ["commit", "-qm", "m"]):
        subprocess.run([*git, *command], check=True)
    os.utime(package / "__init__.py", (0, 0))  # git would note the time in its index, under a lock
    before = (tmp_path / ".git/index").read_bytes()
    assert len(commit_of(package)) == 40
    assert (tmp_path / ".git/index").read_bytes() == before
    (package / "__init__.py").write_text("changed")
    assert commit_of(package).endswith("+")


def test_commit_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of this checkout stores its commit in the package."""
    root = Path(mkd.__file__).parents[1]
    pytest.importorskip("setuptools", "77")  # that of pyproject.toml
    if commit_of(root / "mkd") == "unknown":
        pytest.skip("the tests run outside of a checkout")
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path, "egg_info", "--egg-base", tmp_path]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    package = tmp_path / "lib/mkd"
    stored = commit_of(root / "mkd")
    assert commit_of(package) == (package / FILE).read_text() == stored
    monkeypatch.setenv("PATH", str(tmp_path))  # a host without git
    assert commit_of(package) == stored and commit_of(root / "mkd") == "unknown"


def test_hash_of_the_code_depends_on_names_and_content(tmp_path: Path) -> None:
    hashes = set()
    for name, content in (("a.py", "x"), ("a.py", "y"), ("b/c.py", "x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        hashes.add(source_hash(tmp_path))
        (tmp_path / "notes.txt").write_text(name)
        assert source_hash(tmp_path) in hashes
    assert len(hashes) == 3
