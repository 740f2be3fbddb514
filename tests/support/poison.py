"""Uninitialized memory that shows: what torch hands out without values holds NaN."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While it lasts, `torch.empty`, `torch.empty_like` and `Tensor.new_empty` fill floating tensors with NaN."""

    def poisoned(make: Callable) -> Callable:
        def make_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return make_poisoned

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
