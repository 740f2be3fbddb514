"""Flags in YAML files: --kd-config reads them, and every job with --save writes such a file.

    kd-teacher-hf: teacher
    kd_ratio: 0.9                   # dashes or underscores
    optimizer:                      # headings group flags and have no other meaning
      lr: 1e-4
      bf16: true
    data-path: [0.7, a, 0.3, b]     # or one per line, or nested

A value is what is written: 1e-4, 6:12 or no are these characters, as on the command line, and only true and false are
booleans. The flags precede those of the command line, which therefore win.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from mkd.errors import MkdConfigError, MkdNodeError

FLAG = "--kd-config"
RECORD = "about"
"""Key of what a job records beside its flags. It is not read."""
BOOL, NULL = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"
MOST_BYTES = 1 << 20
MOST_LEVELS = 8
"""Headings and lists inside each other."""


class _Loader(yaml.SafeLoader):
    """Reads all plain scalars as text but true, false and null. Aliases, which can multiply, are refused."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - overrides that of yaml.SafeLoader
    levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*NAME) are not supported", problem_mark=mark)
        self.levels += 1
        if self.levels > MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem=f"more than {MOST_LEVELS} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes text such that `_Loader` reads it back, with quotes only where it needs them."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - overrides that of yaml.SafeDumper

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    """Characters that are not printable, such as line ends, are escaped in double quotes."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    _class.add_implicit_resolver(NULL, re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


@dataclass(frozen=True)
class Setting:
    """A flag in a file."""

    flag: str
    """With its dashes, as on the command line."""
    value: bool | tuple[str, ...]
    """True or False for a flag without a value, else its values."""
    where: str
    """File and line, for messages."""

    @property
    def words(self) -> list[str]:
        """The words of a command line that mean the same."""
        if isinstance(self.value, bool):
            return [self.flag] if self.value else []
        if len(self.value) == 1 and self.value[0].startswith("-"):
            return [f"{self.flag}={self.value[0]}"]
        return [self.flag, *self.value]


def read_file(file: str) -> list[Setting]:
    """The settings of one file.

    Raises:
        MkdConfigError: it cannot be read, is not YAML, or is not a mapping of flags to values.
    """
    where = f"{FLAG} {file}"
    text = _text(file)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise MkdConfigError(f"{where}{_place(error)}: not a YAML file of flags ({_problem(error)})") from None
    if root is None:
        raise MkdConfigError(f"{where} is empty: write FLAG: VALUE, one per line")
    if not isinstance(root, yaml.MappingNode):
        raise MkdConfigError(f"{where} is not a mapping of flags: write FLAG: VALUE, one per line")
    settings = list(_settings(root, where, is_top=True))
    seen: dict[str, str] = {}
    for setting in settings:
        if setting.flag == FLAG:
            raise MkdConfigError(f"{setting.where}: a file cannot name others; give several files in {FLAG}")
        if setting.flag in seen:
            raise MkdConfigError(f"{setting.where}: {setting.flag} is also in {seen[setting.flag]}; remove one")
        seen[setting.flag] = f"line {setting.where.rpartition(' ')[2]}"
    return settings


def record_of(text: str) -> dict[str, Any]:
    """The entries of run.yaml that are not flags: names -> texts, booleans, lists or mappings of them; empty if there
    are none, or the text is no such file."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    found = content.get(RECORD) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def to_yaml(content: Mapping[str, Any]) -> str:
    """Nested mappings, lists, text, numbers and booleans as YAML, in their order."""
    return yaml.dump(_as_text(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 16)


def _as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_text(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(inner) for inner in value]
    return value if isinstance(value, bool) or value is None else str(value)


def _text(file: str) -> str:
    """Content of a regular file of limited size."""
    where = f"{FLAG} {file}"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MkdConfigError(f"{where} is not a regular file; give a YAML file of flags")
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        kind = MkdNodeError if isinstance(error, OSError) else MkdConfigError
        raise kind(f"{where} cannot be read ({reason}); give a YAML file of flags") from None
    if len(content) > MOST_BYTES:
        raise MkdConfigError(f"{where} has more than {MOST_BYTES} bytes; give a YAML file of flags")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MkdConfigError(f"{where} is not UTF-8 text (byte {error.start}); give a YAML file of flags") from None


def _settings(node: yaml.MappingNode, where: str, is_top: bool = False) -> Iterator[Setting]:
    keys = set()
    for key, value in node.value:
        place = f"{where}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or not key.value.lstrip("-"):
            raise MkdConfigError(f"{place}: a key is not the name of a flag")
        if key.value in keys:
            raise MkdConfigError(f"{place}: {_shown(key.value)} is given twice; remove one")
        keys.add(key.value)
        if is_top and key.value == RECORD:
            continue
        flag = "--" + key.value.lstrip("-").replace("_", "-")
        if isinstance(value, yaml.MappingNode):
            yield from _settings(value, where)
        else:
            yield Setting(flag, _value(value, place, _shown(key.value)), place)


def _value(node: yaml.Node, place: str, name: str) -> bool | tuple[str, ...]:
    if isinstance(node, yaml.ScalarNode) and node.tag == BOOL and node.value.lower() in ("true", "false"):
        return node.value.lower() == "true"
    values = tuple(_texts(node, place, name))
    if not values:
        raise MkdConfigError(f"{place}: {name} has an empty list; leave it out, or give values")
    if len(values) > 1 and any(value.startswith("--") for value in values):  # one value becomes --flag=value
        raise MkdConfigError(f"{place}: {name} has a value that begins with --; a key is one flag")
    return values


def _texts(node: yaml.Node, place: str, name: str) -> Iterator[str]:
    if isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            yield from _texts(inner, place, name)
        return
    kind = node.tag.rpartition(":")[2]
    if not isinstance(node, yaml.ScalarNode):
        raise MkdConfigError(f"{place}: {name} has a list of mappings; give text or numbers")
    if kind == "null":
        raise MkdConfigError(f"{place}: {name} has no value; leave it out, or give one")
    if kind != "str":
        raise MkdConfigError(f"{place}: {name} has the value {_shown(node.value)} of kind {kind}; give text or numbers")
    yield node.value


def _shown(text: str) -> str:
    """Text of a file in a message: one line, not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")[1:-1]


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error)
    return " ".join(problem.split())[:200]
