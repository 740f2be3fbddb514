"""Time and memory of the check of PREFIX.idx before a job.

    python benchmarks/bench_index.py --documents 1000000 --tokens 1000000000

Writes an index of random lengths and a sparse PREFIX.bin of the size that it describes, and checks them.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkd.data.sources.indexed import INDEX_HEADER
from mkd.data.sources.token_files import check_index


def write_index(prefix: Path, documents: int, tokens: int) -> None:
    """PREFIX.idx of int32 tokens, and a sparse PREFIX.bin."""
    cuts = np.sort(np.random.default_rng(0).integers(0, tokens, documents - 1))
    bounds = np.concatenate(([0], cuts, [tokens]))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(INDEX_HEADER.pack(b"MMIDIDX\x00\x00", 1, 4, documents, documents + 1))
        np.diff(bounds).astype("<i4").tofile(file)
        (4 * bounds[:-1]).astype("<i8").tofile(file)
        np.arange(documents + 1, dtype="<i8").tofile(file)
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", 4 * tokens)


def main() -> None:
    """Print seconds and the growth of the resident memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "text"
        write_index(prefix, args.documents, args.tokens)
        pid = os.fork()  # the memory of a process that has not written the index
        if pid == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.perf_counter()
            check_index(str(prefix))
            seconds = time.perf_counter() - begin
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(f"{args.documents:,} documents, {args.tokens:,} tokens: {seconds:.2f} s, {grown / 1024:.0f} MiB more")
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
