"""Write the reference pages that ship with CPython (`pydoc_data.topics`) as JSON lines, one page per line.

    python examples/quickstart/make_text.py --out runs/quickstart/data

writes train.jsonl and valid.jsonl; each page is in one of them. By default five pages (3 thousand tokens) are held out
for validation, few enough to be evaluated quickly.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics


def write_pages(path: Path, names: list[str]) -> None:
    """Write pages in the order of `names`, so that every run writes the same file."""
    path.write_text("".join(json.dumps({"name": name, "text": topics[name]}) + "\n" for name in names))
    print(f"{path}: {len(names)} pages, {sum(len(topics[name]) for name in names):,} characters")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder for the two files")
    parser.add_argument(
        "--held-out-every", type=int, default=16, metavar="N", help="hold out every Nth page (%(default)s)"
    )
    args = parser.parse_args()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    held_out = sorted(topics)[2 :: args.held_out_every]
    write_pages(out / "train.jsonl", [name for name in sorted(topics) if name not in held_out])
    write_pages(out / "valid.jsonl", held_out)


if __name__ == "__main__":
    main()
