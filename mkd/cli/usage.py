"""Help texts that show a command as it was called: `mkd convert`, or tools/convert.py in a checkout."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkd.cli.main import COMMANDS
from mkd.errors import MkdConfigError
from mkd.utils.encoding import require_text

SCRIPTS = {"cache": "cache_teacher"}
"""Command -> name of its script in tools/, where they differ."""


class _Parser(argparse.ArgumentParser):
    """A parser that refuses words that are not UTF-8 text."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """See argparse."""
        try:
            require_text(sys.argv[1:] if args is None else args)
        except MkdConfigError as error:
            self.error(str(error))
        return super().parse_known_args(args, namespace)


def command_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help begins with a module's docstring, in which commands are written as `mkd NAME`."""
    return _Parser(description=as_called(doc, sys.argv[0]), formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_own(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's own flags, which stand before those of a training and `--`."""
    own, others = parser.parse_known_args(words)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)} (flags of mkd train go after --)")
    return own


def as_called(doc: str, program: str) -> str:
    """`doc` with the names of scripts in place of `mkd NAME` if the program is a script of a checkout."""
    if Path(program).suffix != ".py":
        return doc

    def script(found: re.Match[str]) -> str:
        name = found["name"].replace("-", "_")
        path = f"tools/{SCRIPTS.get(name, name)}.py"
        return path if found["module"] else f"python {path}"

    doc = doc.replace("mkd train", "pretrain_kd.py")
    return re.sub(rf"(?:(?P<module>-m mkd)|\bmkd) (?P<name>{'|'.join(COMMANDS)})\b", script, doc)
