"""The command `mkd`: its table of commands, its help texts, and the scripts in tools/ that run the same commands."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import mkd
from mkd.cli import cache, doctor, launch, train
from mkd.cli.main import COMMANDS, main
from mkd.cli.usage import as_called
from mkd.config.flags import flags_given

ROOT = Path(__file__).resolve().parents[3]


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert [name for name in COMMANDS if f"  {name} " not in shown] == []


@pytest.mark.parametrize("command", ["write", "verify"])
def test_usage_of_a_cache_shows_where_the_flags_of_a_training_go(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cache.main([command, "--help"])
    assert ended.value.code == 0
    assert "-- FLAGS OF mkd train" in capsys.readouterr().out.partition("\n")[0]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean train?"),
        ("show_alignmnt", "did you mean show-alignment?"),
        ("xyz", "mkd --help lists the commands"),
        ("--kd-ratio", "mkd --help lists the commands"),
    ],
)
def test_an_unknown_command_is_one_line(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"mkd: error: no command {word!r} ({hint})\n"


def test_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mkd {mkd.__version__}\n"
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'attr = "mkd.__version__"' in project


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_module(command: str) -> None:
    assert find_spec(f"mkd.cli.{command.replace('-', '_')}") is not None


def test_every_script_of_tools_runs_a_command() -> None:
    """The commands that are older than `mkd` can still be called as scripts."""
    scripts = {path.name: path.read_text() for path in (ROOT / "tools").glob("*.py")}
    called = {name: re.search(r'run_command\("([a-z-]+)"\)', text) for name, text in scripts.items()}
    assert [name for name, found in called.items() if found is None or found[1] not in COMMANDS] == []
    assert len(scripts) == 9


def test_help_needs_neither_torch_nor_megatron() -> None:
    """The overview takes milliseconds."""
    code = (
        "import sys; from mkd.cli.main import main; sys.argv = ['mkd', 'train', '--help']; "
        "assert main(['--help']) == main() == 0; assert not {'torch', 'numpy', 'megatron'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_of_train_is_one_page_of_flags_that_exist() -> None:
    lines = train.HELP.splitlines()
    assert len(lines) <= 55
    assert max(map(len, lines)) <= 120
    named = set(re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", train.HELP)) - {"--help-all", "--nproc-per-node"}
    assert named == set(flags_given(sorted(named)).values())


def test_help_shows_the_command_as_it_was_called() -> None:
    text = (
        "    mkd convert import --hf DIR\n"
        "    torchrun --nproc-per-node N -m mkd cache write -- FLAGS OF mkd train\n"
        "    mkd doctor\n"
    )
    assert as_called(text, "mkd convert") == text
    assert as_called(text, "tools/convert.py") == (
        "    python tools/convert.py import --hf DIR\n"
        "    torchrun --nproc-per-node N tools/cache_teacher.py write -- FLAGS OF pretrain_kd.py\n"
        "    python tools/doctor.py\n"
    )


@pytest.mark.parametrize(
    ("parse", "own"),
    [
        (doctor.parse_arguments, ["--nproc", "2"]),
        (launch.parse_arguments, ["--teacher-gpus", "1", "--student-gpus", "1"]),
        (cache.run, ["info", "CACHE"]),
    ],
    ids=["doctor", "launch", "cache"],
)
def test_flags_of_a_training_without_the_two_dashes(
    parse: Callable[[list[str]], object], own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*own, "--kd-ratio", "0.5"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --kd-ratio 0.5 (flags of mkd train go after --)" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "package"), [("train", "yaml"), ("plot", "matplotlib"), ("convert", "torch")])
def test_a_package_that_is_not_installed_is_one_line(command: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from mkd.cli.main import main; sys.exit(main([{command!r}]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"mkd {command}: error: the package {package} is not installed in {sys.executable}: activate"
    )


def test_the_script_names_a_missing_package_too() -> None:
    code = "import runpy, sys; sys.modules['yaml'] = None; sys.argv = ['pretrain_kd.py']; runpy.run_path(sys.argv[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("pretrain_kd.py: error: the package yaml is not installed in ")
