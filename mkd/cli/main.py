"""Entry point of `mkd` and `python -m mkd`.

To add a command, add a line to `COMMANDS` and a module of that name, with `_` for `-`, to this folder. Its function
`main(argv: list[str] | None = None) -> int` returns the exit status; without `argv` it reads `sys.argv[1:]`.
"""

import sys
from difflib import get_close_matches
from importlib import import_module

import mkd
from mkd.utils.missing_packages import needs_packages

COMMANDS = {
    "train": "train a student from a teacher",
    "doctor": "check the environment, or the command line of a job",
    "preprocess": "tokenize text for training",
    "prune": "make a smaller student from a teacher",
    "convert": "convert Hugging Face folders to Megatron checkpoints and back",
    "cache": "run a teacher once and store its targets",
    "serve-teacher": "run a teacher for students of other jobs",
    "launch": "start the ranks of a job on one node, also a teacher on GPUs of its own",
    "plot": "plot the curves of runs",
    "report": "write a run as one HTML page",
    "show-alignment": "show a text in the tokens of two tokenizers, side by side",
    "build-projection": "map a student's vocabulary to a teacher's",
    "check-invariance": "compare a job on one rank and in its parallel layout",
}
"""Command -> what it does, in the order of the overview."""


def main(argv: list[str] | None = None) -> int:
    """Run `mkd`. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"mkd {mkd.__version__}")
        return 0
    command = words[0].replace("_", "-")
    if command not in COMMANDS:
        guesses = get_close_matches(command, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {guesses[0]}?" if guesses else "mkd --help lists the commands"
        print(f"mkd: error: no command {words[0]!r} ({hint})", file=sys.stderr)
        return 2
    sys.argv = [f"mkd {command}", *words[1:]]
    return run_command(command)


def run_command(command: str) -> int:
    """Run one command with the flags in `sys.argv`. Returns the exit status."""
    with needs_packages():
        module = import_module(f"mkd.cli.{command.replace('-', '_')}")
    return module.main()


def overview() -> str:
    """All commands, and how to start them."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}s}  {text}" for name, text in COMMANDS.items())
    return f"""usage: mkd COMMAND [FLAG ...]

Megatron Knowledge Distillation {mkd.__version__}: train a student language model from a frozen teacher.

{listed}

  mkd COMMAND --help    flags of a command
  mkd --version         version

python -m mkd is the same command, torchrun --nproc-per-node N -m mkd train ... runs N ranks."""
