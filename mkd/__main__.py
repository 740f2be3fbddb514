"""`python -m mkd`, and `torchrun -m mkd` for several ranks: the same as the command `mkd`."""

import sys

from mkd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
