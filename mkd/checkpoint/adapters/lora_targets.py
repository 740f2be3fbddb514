"""The linear layers that adapter_config.json of a PEFT folder names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mkd.errors import MkdCheckpointError
from mkd.utils.limits import limited

_SECONDS = 5.0
"""A regular expression of another person may backtrack without end."""
_NUMBER = re.compile(r"\.(\d+)\.")


def is_named(module: str, name: str) -> bool:
    """True if PEFT's name of a module, whole or its end, names this one."""
    return module == name or module.endswith(f".{name}")


@dataclass(frozen=True)
class LoraTargets:
    """Values of `target_modules`, `exclude_modules` and `layers_to_transform`."""

    modules: str | list[str] | None
    """Names, a regular expression or all-linear; None for the layers that PEFT chooses by the architecture."""
    excluded: str | list[str] | None
    numbers: list[int] | None
    """None for all layers of the model."""
    error: Callable[[str], MkdCheckpointError]
    """Makes the error that names the folder."""

    @classmethod
    def read(cls, config: Mapping[str, Any], error: Callable[[str], MkdCheckpointError]) -> "LoraTargets":
        """The values of a configuration.

        Args:
            config: content of adapter_config.json.
            error: makes the error that names the folder.

        Raises:
            MkdCheckpointError: a value is of another kind, or a regular expression is broken.
        """
        for key in ("target_modules", "exclude_modules"):
            value = config.get(key)
            is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
            if not (value is None or isinstance(value, str) or is_list):
                raise error(f'adapter_config.json: "{key}" is {str(value)[:80]}; names or a regular expression needed')
            if isinstance(value, str):
                try:
                    re.compile(value)
                except re.error as problem:
                    raise error(
                        f'adapter_config.json: "{key}" is {value!r}, no regular expression: {problem}'
                    ) from None
        numbers = config.get("layers_to_transform")
        numbers = [numbers] if isinstance(numbers, int) else numbers
        if not (numbers is None or (isinstance(numbers, list) and all(isinstance(one, int) for one in numbers))):
            raise error(f'adapter_config.json: "layers_to_transform" is {str(numbers)[:80]}; numbers are needed')
        return cls(config.get("target_modules"), config.get("exclude_modules") or None, numbers or None, error)

    @property
    def names(self) -> list[str]:
        """The names in `target_modules`; empty for another kind of value."""
        return self.modules if isinstance(self.modules, list) else []

    @property
    def description(self) -> str:
        """The values, for messages."""
        parts = {"target_modules": self.modules, "exclude_modules": self.excluded, "layers_to_transform": self.numbers}
        return ", ".join(f'"{key}" {str(value)[:200]}' for key, value in parts.items() if value is not None)

    def has(self, module: str) -> bool:
        """True if PEFT adapts a module of this name."""
        if self.excluded is not None and self._matches(module, self.excluded):
            return False
        if self.modules is not None and self.modules != "all-linear" and not self._matches(module, self.modules):
            return False
        found = _NUMBER.search(module)
        return self.numbers is None or found is None or int(found[1]) in self.numbers

    def _matches(self, module: str, names: str | list[str]) -> bool:
        if isinstance(names, list):
            return any(is_named(module, name) for name in names)
        try:
            with limited(_SECONDS):
                return re.fullmatch(names, module) is not None
        except TimeoutError:
            raise self.error(
                f"adapter_config.json: the regular expression {names[:80]!r} does not end on {module} in "
                f"{_SECONDS:g} s: give the names of the layers instead"
            ) from None
