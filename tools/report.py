"""`mkd report` from a checkout: the same command, without installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkd.cli.main import run_command

if __name__ == "__main__":
    sys.exit(run_command("report"))
