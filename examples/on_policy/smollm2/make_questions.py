"""Write questions about CPython's documentation, made from what every CPython ships: docstrings and `pydoc` pages.

    python examples/on_policy/smollm2/make_questions.py --out runs/smollm2

There are three kinds of questions:

- on the functions, classes and methods of the standard library that have a docstring;
- on the titles of the reference pages (`pydoc_data.topics`);
- on sentences of these pages, which are quoted in the question.

Written are train.questions.jsonl and held_out.questions.jsonl, one conversation without an answer per line. No question
is in both. Answers come from the teacher; nothing checks whether they are right.
"""

import argparse
import builtins
import importlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MODULES = """
argparse ast asyncio base64 bisect calendar collections contextlib copy csv dataclasses datetime difflib dis enum
fnmatch fractions functools glob gzip hashlib heapq html inspect io itertools json keyword linecache logging math
operator os os.path pathlib pickle pprint random re secrets shlex shutil signal socket sqlite3 statistics string
struct subprocess tempfile textwrap threading time tokenize traceback types typing unittest urllib.parse uuid
warnings weakref zipfile
"""
TYPES = (str, bytes, list, dict, set, tuple, int, float, complex, range, slice)
INSTRUCTION = "Answer in one sentence."
MOST_CHARACTERS = 90
"""Length of a quoted sentence. A question has at most 80 tokens of SmolLM2, with the template's system message."""


def public_names(owner: object) -> list[str]:
    """Public names of a module or a class, sorted."""
    return sorted(name for name in getattr(owner, "__all__", dir(owner)) if not name.startswith("_"))


def documented_names() -> Iterator[tuple[str, object]]:
    """Dotted name and object of documented functions, classes and methods."""
    owners = [(name, importlib.import_module(name)) for name in MODULES.split()]
    owners += [("", builtins), *((kind.__name__, kind) for kind in TYPES)]
    for prefix, owner in owners:
        for name in public_names(owner):
            found = getattr(owner, name, None)
            if callable(found) and (inspect.getdoc(found) or "").strip():
                yield f"{prefix}.{name}".lstrip("."), found


def sentences(page: str) -> list[str]:
    """Whole sentences of the paragraphs of a page that are neither code, nor lists, nor grammar."""
    found = []
    for paragraph in re.split(r"\n\s*\n", page):
        if re.match(r"[A-Z\"]\S* ", paragraph) and "::=" not in paragraph and "\n   " not in paragraph:
            found += re.split(r"(?<=[a-z\")]\.) (?=[A-Z])", " ".join(paragraph.split()))
    return [text for text in found if 40 <= len(text) <= MOST_CHARACTERS and text.endswith(".")]


def questions() -> list[str]:
    """All questions, each once, in the same order in every run with the same Python."""
    found = [
        f"What is Python's {name} for?" if inspect.isclass(target) else f"What does Python's {name} do?"
        for name, target in documented_names()
    ]
    for name in sorted(topics):
        title = topics[name].strip().split("\n", 1)[0].strip('"')
        found.append(f'What does Python\'s documentation explain under "{title}"?')
        found += [
            f'What does this sentence of Python\'s documentation mean? "{text}"' for text in sentences(topics[name])
        ]
    return [f"{question} {INSTRUCTION}" for question in dict.fromkeys(found)]


def write_questions(path: Path, texts: list[str]) -> None:
    """Write conversations without an answer."""
    lines = (json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) for text in texts)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(texts)} questions")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--train", type=int, metavar="N", help="training questions (all that are not held out)")
    parser.add_argument("--held-out", type=int, default=32, metavar="N", help="held-out questions (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = questions()
    random.Random(1).shuffle(found)
    write_questions(args.out / "held_out.questions.jsonl", found[: args.held_out])
    write_questions(args.out / "train.questions.jsonl", found[args.held_out :][: args.train])


if __name__ == "__main__":
    main()
