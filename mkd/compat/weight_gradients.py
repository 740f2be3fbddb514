"""Weight gradients that Transformer Engine's layers add to Megatron's buffers, without NVIDIA Apex."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mkd.errors import MkdConfigError

_FLAG = "fuse_wgrad_accumulation"
_Placeholder = Callable[[list[int], torch.dtype], Tensor]
"""Shape and dtype of a weight -> the tensor that its layer returns in place of the gradient."""


def accumulate_in_layers(chunks: Sequence[nn.Module]) -> list[str]:
    """Make Transformer Engine's layers add the gradients of their weights to `main_grad` in the matrix product that
    computes them. Otherwise the gradient is written in the weight's dtype and added by a second kernel.

    Megatron ties this to --gradient-accumulation-fusion, which needs an extension of NVIDIA Apex, but only for
    Megatron's own linear layers. Those keep without: the flag of their configuration stays off.

    A layer is included if Megatron's DDP has given each of its weights a `main_grad`, which frozen weights and modules
    outside of DDP do not have, and if no other module holds them. Such a layer returns a placeholder, and DDP ignores
    the whole gradient that autograd passes for the weight. When the layer runs for the first time, this must be the
    placeholder alone: a weight whose layer is called twice, or which is also read elsewhere, raises an error.

    Args:
        chunks: the student's model chunks in DDP.

    Returns:
        Names of the weights.

    Raises:
        MkdConfigError: in the first backward pass.
    """
    holders = Counter(id(own) for chunk in chunks for module in chunk.modules() for own in _parameters(module).values())
    found = []
    for number, chunk in enumerate(chunks):
        for path, module in chunk.named_modules():
            placeholder = _placeholder(module)
            weights = {name: own for name, own in _parameters(module).items() if name.startswith("weight")}
            if placeholder is None or not weights:
                continue
            if all(_is_accumulated(weight) and holders[id(weight)] == 1 for weight in weights.values()):
                setattr(module, _FLAG, True)
                for name, weight in weights.items():
                    found.append(f"chunk {number}: {path}.{name}")
                    _check_first_gradient(found[-1], weight, placeholder)
    return found


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _placeholder(module: nn.Module) -> _Placeholder | None:
    """The function from which a layer of Transformer Engine gets its placeholder; None for other modules, and for
    grouped layers of releases that allocate a new one each time, which cannot be told from a gradient."""
    if not hasattr(module, _FLAG):
        return None
    kinds = (kind for kind in type(module).__mro__ if _FLAG in inspect.signature(kind.__init__).parameters)
    kind = next(kinds, type(module))
    return getattr(sys.modules[kind.__module__], "get_dummy_wgrad", None)


def _is_accumulated(weight: nn.Parameter) -> bool:
    """True if Megatron's DDP accumulates the weight's gradient as it is, and ignores a placeholder."""
    if not weight.requires_grad or not hasattr(weight, "grad_added_to_main_grad"):
        return False
    if getattr(weight, "zero_out_wgrad", False) or getattr(weight, "is_gtp_weight_remat", False):
        return False  # DDP adds the placeholder as well, or the weight is a shard of the layer's
    buffer = getattr(weight, "main_grad", None)
    return buffer is not None and buffer.shape == weight.shape


def _check_first_gradient(name: str, weight: nn.Parameter, placeholder: _Placeholder) -> None:
    """Check the gradient of the first backward pass in which the layer adds to `main_grad`."""
    handles = []
    handles.append(weight.register_hook(partial(_check_gradient, name, weight, placeholder, handles)))


def _check_gradient(
    name: str, weight: nn.Parameter, placeholder: _Placeholder, handles: list, gradient: Tensor
) -> None:
    if not weight.grad_added_to_main_grad:
        return  # DDP adds the gradient
    # A sum with another gradient is a new tensor.
    if gradient.data_ptr() != placeholder(list(weight.shape), weight.dtype).data_ptr():
        raise MkdConfigError(
            f"{name}: this weight is used by more than one call of its layer, and a part of its gradient would be "
            "lost: give --no-gradient-accumulation-fusion"
        )
    handles.pop().remove()
