"""docs/security.md lists every file that runs, unpickles, loads, connects, opens or replaces, and no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/security.md"
FILES = [
    path for folder in ("mkd", "tools", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "pretrain_kd.py", ROOT / "setup.py"]

CALLS: dict[str, tuple[str, ...]] = {
    "runs": (
        r"subprocess\.\w+|os\.(system|popen|fork\w*|posix_spawn\w*|(exec|spawn)[lv]\w*)|eval|exec|compile|__import__",
        r"runpy\.\w+|importlib\.import_module|import_module|ctypes\.\w+(\.\w+)*|multiprocessing\.\w+|.*\.(Process|Pool)|ProcessPoolExecutor",
        r".*\.(apply_chat_template|render_jinja_template|from_string)|(.*\.)?get_context|.*set_start_method",
    ),
    "unpickles": (
        r"(pickle|cPickle|dill|joblib|marshal|shelve)\.\w+|torch\.load|.*Unpickler|(np|numpy)\.load|yaml\.\w+",
        r"dcp\.load|.*dist_checkpointing\.load\w*|.*\.safe_globals|.*get_unsafe_globals_in_checkpoint",
    ),
    "loads": (r".*\.from_pretrained|.*\.from_file|.*safe_open|.*load_file|.*load_tensors|TokenizersBackend.*",),
    "connects": (r"socket\.\w+|urllib3?\.\w+(\.\w+)*|.*\.urlopen|requests\.\w+|http\.\w+(\.\w+)*|.*\.connect",),
    "opens": (
        r"open|io\.open|os\.open|.*\.(open|read_text|read_bytes)|(np|numpy)\.(memmap|fromfile)|mmap\.mmap|IndexedDataset",
        r"read_regular|torch\.from_file",
    ),
    "replaces": (
        r".*\.(write_text|write_bytes|unlink|rmdir|rmtree|rename|tofile|truncate|symlink_to|touch|removedirs)",
        r"os\.(replace|rename|remove|unlink|truncate)|shutil\.(copy\w*|move|rmtree)|save_file|replacing|write_bytes",
        r"copy_file|publish_files|new_folder|rename|remove_folder|.*\.save_pretrained|.*savefig",
    ),
}
"""Kind -> names of functions, in full."""
PATTERNS = {kind: re.compile("|".join(f"(?:{part})" for part in parts)) for kind, parts in CALLS.items()}
NOT_CALLS = re.compile(r"re\.compile|.*\.eval|torch\.compile|str\.replace|webbrowser\.open")


def kinds_of(source: str) -> set[str]:
    """Kinds of `CALLS` in a source text: calls, and classes that extend an unpickler."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            names.append(ast.unparse(node.func))
        elif isinstance(node, ast.ClassDef):
            names += [ast.unparse(base) for base in node.bases]
    names = [name for name in names if not NOT_CALLS.fullmatch(name)]
    return {kind for kind, pattern in PATTERNS.items() if any(pattern.fullmatch(name) for name in names)}


def listed(page: str) -> dict[str, set[str]]:
    """File -> kinds, from the rows of the page's table, each with the verdicts of two readers."""
    rows = re.findall(r"^\| `([\w/.]+\.py)` \| ([a-z, ]+) \| .+ \| .+ \|$", page, re.MULTILINE)
    assert len(rows) == len({file for file, _ in rows})
    return {file: set(kinds.split(", ")) for file, kinds in rows}


def test_the_list_is_complete() -> None:
    found = {str(path.relative_to(ROOT)): kinds_of(path.read_text()) for path in FILES}
    table = listed(PAGE.read_text())
    assert len(table) > 60
    missing = {file: kinds for file, kinds in found.items() if kinds - table.get(file, set())}
    assert missing == {}, "read what these files do, and add them to docs/security.md with two verdicts"
    assert {file: kinds for file, kinds in table.items() if kinds - found.get(file, set())} == {}


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("import pickle\npickle.load(file)", {"unpickles"}),
        ("class Mine(pickle.Unpickler): pass", {"unpickles"}),
        ("torch.load(path)", {"unpickles"}),
        ("subprocess.run(['ls'])", {"runs"}),
        ("eval('1')", {"runs"}),
        ("model.eval()\nre.compile('x')\n'a'.replace('a', 'b')", set()),
        ("yaml.safe_load(text)", {"unpickles"}),
        ("AutoTokenizer.from_pretrained(folder)", {"loads"}),
        ("with Path('x').open('rb') as file: pass", {"opens"}),
        ("os.replace(a, b)\nfile.read_text()", {"opens", "replaces"}),
        ("socket.socket()", {"connects"}),
        ("pool.urlopen('GET', '/')", {"connects"}),
    ],
)
def test_calls_are_found(source: str, kinds: set[str]) -> None:
    assert kinds_of(source) == kinds
