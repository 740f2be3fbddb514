"""The structure of the code: folders import only from those above, nothing imports in a circle, names are unique."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "mkd").rglob("*.py"))
}
FILES_PER_PACKAGE = 20
NAMES_IN_MKD = 18

type Graph = dict[str, set[str]]


def folders_of_readme() -> list[str]:
    """Names under `mkd/` in the order of the README's tree, which is the order of imports."""
    tree = (ROOT / "README.md").read_text().split("## Read the code")[1].split("```")[1]
    inside = tree.split("mkd/\n")[1].split("\ntools/")[0]
    return [line.split()[0].removesuffix("/").removesuffix(".py") for line in inside.splitlines()]


FOLDERS = folders_of_readme()


def imports_of(source: str) -> list[tuple[int, str]]:
    """Line and full name of each import of mkd, wherever it stands in the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the full name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return sorted((line, name) for line, name in found if name.split(".")[0] == "mkd")


def imports_of_no_module(source: str) -> list[str]:
    """Modules of mkd that a source text names in an import and that do not exist."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            named.add(node.module)
    return sorted(name for name in named if name.split(".")[0] == "mkd" and name not in MODULES)


def upward_imports(module: str, source: str, order: list[str]) -> list[str]:
    """Imports in `module` from folders that stand below its own in `order`."""
    own = order.index(module.split(".")[1])
    return [
        f"line {line}: {name}"
        for line, name in imports_of(source)
        if name.count(".") and order.index(name.split(".")[1]) > own
    ]


def module_graph() -> Graph:
    """Module -> modules that it imports."""
    graph: Graph = {}
    for module, path in MODULES.items():
        targets = set()
        for _, name in imports_of(path.read_text()):
            while name not in MODULES:
                name = name.rpartition(".")[0]
            targets.add(name)
        graph[module] = targets - {module}
    return graph


def children(graph: Graph, package: str) -> Graph:
    """The graph between the direct children of a package, files and subfolders alike."""

    def child(module: str) -> str | None:
        inside = module.startswith(package + ".")
        return module[len(package) + 1 :].split(".")[0] if inside else None

    found: Graph = {}
    for module, targets in graph.items():
        if (own := child(module)) is not None:
            found.setdefault(own, set()).update(c for c in map(child, targets) if c not in (None, own))
    return found


def circle(graph: Graph) -> list[str]:
    """Nodes that import each other in circles, or lie between two circles."""
    left = {node: set(targets) for node, targets in graph.items()}
    while left:
        imported = set().union(*left.values())
        free = [node for node, targets in left.items() if node not in imported or not targets & left.keys()]
        if not free:
            break
        for node in free:
            del left[node]
    return sorted(left)


def public_classes(modules: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    for module, path in modules:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, module


GRAPH = module_graph()
PACKAGES = [module for module, path in MODULES.items() if path.name == "__init__.py"]


def test_the_readme_lists_the_folders_of_mkd() -> None:
    existing = {p.name.removesuffix(".py") for p in (ROOT / "mkd").iterdir() if not p.name.startswith("__")}
    assert sorted(FOLDERS) == sorted(existing)
    shown = {path.name for path in (ROOT / "mkd").iterdir()} - {"__init__.py", "__pycache__"}
    assert len(shown) <= NAMES_IN_MKD


def test_modules_import_only_from_folders_above() -> None:
    modules = [module for module in MODULES if module not in ("mkd", "mkd.__main__")]
    found = {module: upward_imports(module, MODULES[module].read_text(), FOLDERS) for module in modules}
    assert {module: imports for module, imports in found.items() if imports} == {}


def test_upward_imports_are_seen() -> None:
    source = "def f():\n    from mkd.train.schedule import wrap\nimport mkd.errors\nfrom mkd import report, config\n"
    found = upward_imports("mkd.losses.reference.dense", source, FOLDERS)
    assert found == ["line 2: mkd.train.schedule.wrap", "line 4: mkd.report"]
    assert upward_imports("mkd.job.doctor.run", source, FOLDERS) == []


def test_every_import_names_a_module() -> None:
    """Also inside functions, and in files that need a GPU or hours, which few runs of the tests import."""
    files = [
        path for folder in ("mkd", "tests", "tools", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)): imports_of_no_module(path.read_text()) for path in files}
    assert {file: names for file, names in found.items() if names} == {}
    assert imports_of_no_module(
        "def f():\n    from mkd.nothing import a\nimport mkd.job.nothing\nimport mkd.errors\n"
    ) == [
        *("mkd.job.nothing", "mkd.nothing"),
    ]


def test_modules_do_not_import_in_a_circle() -> None:
    assert circle(GRAPH) == []


def test_files_and_folders_of_a_package_do_not_import_in_a_circle() -> None:
    circles = {package: circle(children(GRAPH, package)) for package in PACKAGES}
    assert {package: found for package, found in circles.items() if found} == {}


def test_circles_are_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert circle(children({"p.x.a": {"p.y"}, "p.y": {"p.x.b"}, "p.x.b": set()}, "p")) == ["x", "y"]


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for name, module in public_classes(MODULES.items()):
        places.setdefault(name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_packages_are_small() -> None:
    files = {package: len(list(MODULES[package].parent.glob("*.py"))) - 1 for package in PACKAGES}
    assert {package: count for package, count in files.items() if count > FILES_PER_PACKAGE} == {}


def test_unit_tests_mirror_the_packages() -> None:
    folders = {path for path in (ROOT / "tests/unit").rglob("*") if path.is_dir() and path.name != "__pycache__"}
    names = {str(path.relative_to(ROOT / "tests/unit")) for path in folders} - {"tools", "benchmarks"}
    assert "config/megatron" in names
    assert {name for name in names if not (ROOT / "mkd" / name).is_dir()} == set()


def test_the_flags_of_mkd_do_not_import_megatrons_arguments() -> None:
    outside = {m: found for m, found in GRAPH.items() if m.startswith("mkd.config.") and ".megatron" not in m}
    assert {m for m, found in outside.items() if any(one.startswith("mkd.config.megatron") for one in found)} == set()


def test_every_tool_is_in_the_docs() -> None:
    text = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    tools = [path.name for path in (ROOT / "tools").iterdir() if path.suffix in (".py", ".sh")]
    assert [tool for tool in tools if not re.search(rf"tools/{re.escape(tool)}\b", text)] == []
