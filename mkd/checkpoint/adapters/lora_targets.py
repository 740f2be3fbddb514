"""The linear layers that adapter_config.json of a PEFT folder names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mkd.errors import MkdCheckpointError
from mkd.utils.limits import limited

_SECONDS = 5.0
"""A regular expression of another person may backtrack without end."""
_NUMBERED = r".*?\.[^.]*\.(?P<number>\d+)\."
"""Beginning of a module's name, with the first number in any list below the model."""


def is_named(module: str, name: str) -> bool:
    """True if PEFT's name of a module, whole or its end, names this one."""
    return module == name or module.endswith(f".{name}")


@dataclass(frozen=True)
class LoraTargets:
    """Values of `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern`."""

    modules: str | list[str] | None
    """Names, a regular expression or all-linear; None for the layers that PEFT chooses by the architecture."""
    excluded: str | list[str] | None
    numbers: list[int] | None
    """None for all layers of the model. A module that `modules` names as a whole is adapted at any number."""
    lists: list[str]
    """Regular expressions for the names of the lists in which the layers have these numbers; empty: any list."""
    error: Callable[[str], MkdCheckpointError]
    """Makes the error that names the folder."""

    @classmethod
    def read(cls, config: Mapping[str, Any], error: Callable[[str], MkdCheckpointError]) -> "LoraTargets":
        """The values of a configuration.

        Args:
            config: content of adapter_config.json.
            error: makes the error that names the folder.

        Raises:
            MkdCheckpointError: a value is of another kind, a regular expression is broken, or PEFT refuses the values
                together.
        """
        for key in ("target_modules", "exclude_modules"):
            value = config.get(key)
            is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
            if not (value is None or isinstance(value, str) or is_list):
                raise error(f'adapter_config.json: "{key}" is {str(value)[:80]}; names or a regular expression needed')
            if isinstance(value, str):
                _require_expression(key, value, error)
        numbers = config.get("layers_to_transform")
        numbers = [numbers] if isinstance(numbers, int) else numbers
        if not (numbers is None or (isinstance(numbers, list) and all(isinstance(one, int) for one in numbers))):
            raise error(f'adapter_config.json: "layers_to_transform" is {str(numbers)[:80]}; numbers are needed')
        lists = config.get("layers_pattern") or []
        lists = [lists] if isinstance(lists, str) else lists
        if not isinstance(lists, list) or not all(isinstance(one, str) for one in lists):
            raise error(f'adapter_config.json: "layers_pattern" is {str(lists)[:80]}; names are needed')
        for one in lists:
            _require_expression("layers_pattern", one, error, _numbered(one))
        modules = config.get("target_modules")
        for key in ("layers_to_transform", "layers_pattern"):
            if isinstance(modules, str) and config.get(key) is not None:
                raise error(
                    f'adapter_config.json: "{key}" is {str(config[key])[:80]}, which PEFT refuses beside '
                    f'"target_modules" {modules[:80]!r}: a list of names is needed there'
                )
        if lists and numbers is None:
            raise error(
                f'adapter_config.json: "layers_pattern" is {str(lists)[:80]}, which PEFT refuses without '
                '"layers_to_transform"'
            )
        return cls(modules, config.get("exclude_modules") or None, numbers or None, lists, error)

    @property
    def names(self) -> list[str]:
        """The names in `target_modules`; empty for another kind of value."""
        return self.modules if isinstance(self.modules, list) else []

    @property
    def description(self) -> str:
        """The values, for messages."""
        parts = {
            "target_modules": self.modules,
            "exclude_modules": self.excluded,
            "layers_to_transform": self.numbers,
            "layers_pattern": self.lists or None,
        }
        return ", ".join(f'"{key}" {str(value)[:200]}' for key, value in parts.items() if value is not None)

    def has(self, module: str) -> bool:
        """True if PEFT adapts a module of this name."""
        if self.excluded is not None and self._matches(module, self.excluded):
            return False
        if self.modules is not None and self.modules != "all-linear" and not self._matches(module, self.modules):
            return False
        return self.numbers is None or module in self.names or self._number(module) in self.numbers

    def _number(self, module: str) -> int | None:
        """The number of the layer that a module belongs to; None outside of the lists."""
        for expression in map(_numbered, self.lists) if self.lists else [_NUMBERED]:
            if (found := self._search(re.match, expression, module)) is not None:
                return None if found["number"] is None else int(found["number"])
        return None

    def _matches(self, module: str, names: str | list[str]) -> bool:
        if isinstance(names, list):
            return any(is_named(module, name) for name in names)
        return self._search(re.fullmatch, names, module) is not None

    def _search(self, how: Callable[[str, str], re.Match[str] | None], expression: str, module: str) -> Any:
        try:
            with limited(_SECONDS):
                return how(expression, module)
        except TimeoutError:
            raise self.error(
                f"adapter_config.json: the regular expression {expression[:80]!r} does not end on {module} in "
                f"{_SECONDS:g} s: give the names of the layers instead"
            ) from None


def _numbered(name: str) -> str:
    """A regular expression for the beginning of a module's name, with the first number in a list of this name."""
    return rf"(?:^|.*?\.){name}\.(?P<number>\d+)\."


def _require_expression(
    key: str, value: str, error: Callable[[str], MkdCheckpointError], expression: str | None = None
) -> None:
    """Raise `error` unless the value of a key is a regular expression, alone or as a part of `expression`."""
    try:
        re.compile(value if expression is None else expression)
    except re.error as problem:
        raise error(f'adapter_config.json: "{key}" is {value!r}, no regular expression: {problem}') from None
