"""Write docs/licenses.md: the licenses of all packages in requirements.lock, as the installed packages state them.

python tools/environment/licenses.py
"""

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK, PAGE = ROOT / "requirements.lock", ROOT / "docs" / "licenses.md"
HEAD = """# Licenses of the dependencies

Written by `bash tools/lock_env.sh` from the metadata of the installed packages; versions and hashes are in
`requirements.lock`. mkd itself is licensed under Apache-2.0 and contains no code of these packages. Packages for other
platforms than Linux on x86-64 are listed without a license where they are not installed. The proprietary packages are
NVIDIA's CUDA libraries, which torch requires, and which run only where there is a GPU.

| package | version | license |
|---|---|---|
"""


def locked(text: str) -> dict[str, str]:
    """Package -> version, from the text of a lock file."""
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==([\w.+!]+)", text, re.MULTILINE | re.IGNORECASE))


def license_of(package: str) -> str:
    """The license that a package states in its metadata; "not installed here", or "not stated"."""
    try:
        facts = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return "not installed here"
    classifiers = [c.rpartition(" :: ")[2] for c in facts.get_all("Classifier", []) if c.startswith("License ::")]
    stated = (facts.get("License") or "").strip()
    short = stated if stated and "\n" not in stated and len(stated) < 60 else ""
    return facts.get("License-Expression") or ", ".join(classifiers) or short or _first_line(stated) or "not stated"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:60] if lines else ""


def page(lock: str) -> str:
    """The whole page."""
    rows = [f"| {name} | {version} | {license_of(name)} |\n" for name, version in sorted(locked(lock).items())]
    return HEAD + "".join(rows)


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(page(LOCK.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
