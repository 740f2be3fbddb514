"""Write the reference pages that come with CPython (`pydoc_data.topics`) as JSON lines, one page a line.

python examples/quickstart/make_text.py --out runs/quickstart/data/topics.jsonl
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics


def main() -> None:
    """Run the script. The pages are sorted by name, so that the file is the same on every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines file to write")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"name": name, "text": topics[name]}) + "\n" for name in sorted(topics)))
    print(f"{out}: {len(topics)} documents, {sum(map(len, topics.values())):,} characters")


if __name__ == "__main__":
    main()
