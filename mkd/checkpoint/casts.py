"""Weights that are cast to another dtype when they are loaded or written: none may leave its range.

fp16 ends at 65504 and bf16 slightly below fp32. A weight beyond it would become infinite without a message, and
training would skip every step, or learn from a teacher that is NaN.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mkd.errors import MkdCheckpointError
from mkd.utils.logging import logger

MOST_LOST = 0.1
"""Share of a tensor's values that may become 0 without a warning: those below 3e-8 in fp16."""
_NAMED = 3
"""Number of tensors that a message names."""
_REMEDY = "give --bf16, or for a teacher --kd-teacher-dtype bf16 or fp32"


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as float16."""
    return str(dtype).removeprefix("torch.")


@dataclass
class CastCheck:
    """Checks the casts of one model's weights."""

    error: Callable[[str], MkdCheckpointError]
    """Makes the error that names the model's folder."""
    remedy: str = _REMEDY
    _lost: list[str] = field(default_factory=list)
    """Tensors of which many values become 0."""

    def cast(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """The value [...] in `dtype`; raises as `check`."""
        self.check(name, value, dtype)
        return value.to(dtype)

    def check(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        """Refuse a cast of `value` to `dtype` by which finite values become infinite.

        Raises:
            MkdCheckpointError: names the tensor, the number of such values, and what to change.
        """
        if not (value.is_floating_point() and dtype.is_floating_point and value.numel()):
            return
        limits = torch.finfo(dtype)
        if torch.finfo(value.dtype).max <= limits.max:
            return
        largest = max(abs(bound.item()) for bound in torch.aminmax(value))
        if not largest <= limits.max:  # or NaN
            overflow = value.isfinite() & ~value.to(dtype).isfinite()
            if count := int(overflow.sum()):
                largest = value[overflow].abs().max().item()
                raise self.error(
                    f"{count} of the {value.numel()} values of tensor {name} are beyond the range of {name_of(dtype)} "
                    f"(largest {largest:.4g}, limit {limits.max:.4g}) and would become infinite: {self.remedy}"
                )
        if dtype == torch.float16:
            used = value != 0
            lost = int((used & (value.to(dtype) == 0)).sum())
            if lost > MOST_LOST * int(used.sum()):
                self._lost.append(name)

    def warn(self) -> None:
        """Log a line if many values of some tensor became 0."""
        if self._lost:
            more = f" and {len(self._lost) - _NAMED} more" if len(self._lost) > _NAMED else ""
            logger.warning(
                f"more than {MOST_LOST:.0%} of the values of {', '.join(self._lost[:_NAMED])}{more} are below fp16's "
                f"smallest number and become 0: {self.remedy}"
            )


def count_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Name -> number of infinite values and NaN of the tensors that have any. One wait for the device."""
    named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not named:
        return {}
    counts = torch.stack([(~tensor.isfinite()).sum() for _, tensor in named]).tolist()
    return {name: count for (name, _), count in zip(named, counts, strict=True) if count}


def listed(counts: Mapping[str, int]) -> str:
    """The first tensors of `count_not_finite`, for a message."""
    more = f" and {len(counts) - _NAMED} more tensors" if len(counts) > _NAMED else ""
    return ", ".join(f"{count} values of {name}" for name, count in list(counts.items())[:_NAMED]) + more
