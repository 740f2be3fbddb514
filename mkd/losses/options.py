"""Options of a loss that do not change its value beyond rounding."""

from dataclasses import dataclass

import torch

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError
from mkd.losses.kernels.select import resolve

_LOGITS_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class LossOptions:
    """Memory, precision and implementation of a loss from hidden states."""

    chunk_rows: int | None = None
    """Tokens of the teacher whose logits exist at one time, twice as many of the student. None: 192 MiB of logits, or
    768 tokens on a GPU."""
    logits_dtype: torch.dtype | None = None
    """Dtype of the logits of a loss chunk; None: bf16 for bf16 hidden states on a GPU, else fp32. Logits rounded to
    bf16 put a floor under the gradient's error when student and teacher are close."""
    impl: str = "auto"
    """auto (Triton on a GPU, eager elsewhere), eager, triton, or reference (definition and autograd; one rank)."""
    share: float = 1.0
    """The tokens of a loss are this share of a microbatch's. The default loss chunk shrinks with it, and with it the
    memory of the loss."""

    @classmethod
    def of(cls, kd: KDConfig, device: torch.device, dtype: torch.dtype, tp_size: int) -> "LossOptions":
        """Options from the flags, for a student of `dtype` on `device`, with the vocabulary split over `tp_size` ranks.

        Raises:
            MkdConfigError: an implementation that cannot run there, or a precision that it does not have.
        """
        impl = kd.loss_impl
        if impl == "reference" and tp_size > 1:
            raise MkdConfigError(
                f"--kd-loss-impl reference runs on one tensor-parallel rank, --tensor-model-parallel-size is "
                f"{tp_size}: use eager"
            )
        if impl != "reference":
            try:
                impl = resolve(impl, device, dtype)
            except ValueError as error:
                raise MkdConfigError(f"--kd-loss-impl {impl}: {error}") from error
        if kd.logits_dtype == "bf16" and (dtype != torch.bfloat16 or impl == "reference"):
            raise MkdConfigError(
                f"--kd-logits-dtype bf16 needs a student in bf16 (--bf16) and --kd-loss-impl eager or triton; this is "
                f"{dtype} with {impl}: use fp32"
            )
        return cls(kd.loss_chunk_rows, _LOGITS_DTYPES[kd.logits_dtype], impl)
