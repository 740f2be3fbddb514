"""The tolerances of all tests, each with its reason, and the comparison that uses them."""

import torch
from torch import Tensor

from mkd.models.model_options import ModelOptions

FP64 = 1e-12
"""float64 against float64 in another order: rounding is 1e-16, sums of thousands of terms lose up to 3 digits."""

FP32 = 1e-5
"""fp32 against the float64 reference: rounding is 6e-8; a chain of GEMM, softmax and GEMM over thousands of terms loses
two digits. A wrong factor, mask or missing reduction is far above."""

STEP_LOSS = 1e-6
"""The loss of one step in fp32 in two parallel layouts: sums in another order."""

GRADIENT = 1e-5
"""The gradient of one parameter in fp32 in two parallel layouts: as FP32."""

UPDATE = 5e-5
"""The change of one parameter by some steps of Adam in fp32 in two parallel layouts: Adam divides each element's
gradient by its own size, so the rounding of elements with a small gradient counts as much as that of the others."""

LOGITS = 1e-4
"""Absolute, fp32: Megatron's logits against transformers' of the same weights; values up to a few tens, operations in
another order. A misplaced tensor, head or norm changes logits by more than 1."""

QUANTIZED = 1e-4
"""The gradient of one parameter in fp32 from a teacher cache of 12 bits a value, against that from the values
themselves: its steps are 0.0015 nats at the most likely token, and errors of many tokens cancel."""

HALF_FACTOR = 2.0
"""bf16 and fp16: our error against fp32 may be this many times that of eager torch in the same dtype."""


def norm_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the 2-norm, in float64; the plain norm of `actual` if `expected` is 0."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    size = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(actual - expected).item() / (size or 1.0)


def gradient_error(name: str, actual: Tensor, expected: Tensor, options: ModelOptions) -> float:
    """Error of the gradient of the parameter `name` in the 2-norm: relative, or absolute where the gradient is 0.

    Args:
        name: Megatron's name.
        actual: the gradient.
        expected: the gradient of transformers.
        options: `ModelOptions` of the model.
    """
    if options.normalized_single_expert and name.endswith("router.weight"):
        # transformers divides the expert's score by itself: both gradients are rounding errors
        return max(torch.linalg.vector_norm(value).item() for value in (actual, expected))
    return norm_error(actual, expected)


def assert_close_norm(actual: Tensor, expected: Tensor, tol: float, name: str) -> None:
    """Fail if the norm-relative error is above `tol` or is NaN; the message holds `name`."""
    error = norm_error(actual, expected)
    assert error <= tol, f"{name}: norm-relative error {error:.3g}, allowed {tol:g}"
