"""Flags of Megatron that need a GPU, Transformer Engine, another package or a file, which Megatron itself finds out
when the models are built, or after the first step."""

from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from mkd import cpu
from mkd.errors import MkdConfigError, MkdNodeError, MkdPackageError

NEED_GPU: dict[str, Callable[[Namespace], bool]] = {
    "--profile": lambda args: args.profile and not args.use_pytorch_profiler,
    "--record-memory-history": lambda args: args.record_memory_history,
    "--log-straggler": lambda args: args.log_straggler,
    "--log-device-memory-used": lambda args: args.log_device_memory_used,
    "--optimizer-cuda-graph": lambda args: args.optimizer_cuda_graph,
    "--use-precision-aware-optimizer": lambda args: args.use_precision_aware_optimizer,
    "--gpu-sniff-test-interval": lambda args: args.gpu_sniff_test_interval is not None,
}
"""Flag -> whether it is given."""

NEED_TRANSFORMER_ENGINE: dict[str, Callable[[Namespace], bool]] = {
    "--cpu-offloading-num-layers": lambda args: args.cpu_offloading_num_layers > 0,
    "--save-activations-interval": lambda args: args.save_activations_interval is not None,
    "--save-dgrads-interval": lambda args: args.save_dgrads_interval is not None,
    "--fp32-residual-connection": lambda args: args.fp32_residual_connection,
}
"""The same; Megatron's own layers cannot compute with them."""

_MONITORED = ("pynvml", "nvidia-ml-py")
_RESILIENT = ("nvidia_resiliency_ext", "nvidia-resiliency-ext")
NEED_PACKAGE: dict[str, tuple[Callable[[Namespace], bool], tuple[str, str]]] = {
    "--log-straggler": (lambda args: args.log_straggler, _MONITORED),
    "--log-device-memory-used": (lambda args: args.log_device_memory_used, _MONITORED),
    "--enable-ft-package": (lambda args: args.enable_ft_package, _RESILIENT),
    # The layers of Transformer Engine need the same package.
    "--use-precision-aware-optimizer": (
        lambda args: (
            args.use_precision_aware_optimizer and not args.optimizer_cpu_offload and args.transformer_impl == "local"
        ),
        ("transformer_engine", "transformer-engine"),
    ),
}
"""Flag -> (whether it is given, names of its package for `import` and for pip)."""

FILES = ("--te-precision-config-file", "--nccl-communicator-config-path")
"""Flags with the path of a file."""


def check_machine_needs(args: Namespace) -> None:
    """Refuse flags that need what this machine, or this Python, does not have.

    Raises:
        MkdConfigError: naming the flag.
        MkdNodeError: a file is missing.
    """
    for flag, is_given in NEED_GPU.items():
        if cpu.is_target() and is_given(args):
            raise MkdConfigError(f"{flag} needs a GPU: leave it out on CPU (mkd doctor checks a job for GPUs)")
    is_local = cpu.is_target() or args.transformer_impl == "local"
    for flag, is_given in NEED_TRANSFORMER_ENGINE.items():
        if is_local and is_given(args):
            raise MkdConfigError(f"{flag} needs the layers of Transformer Engine, on GPUs: leave it out")
    for flag, (is_given, (module, package)) in NEED_PACKAGE.items():
        if is_given(args) and find_spec(module) is None:
            raise MkdPackageError(
                f"{flag} needs the package {package}, which is not installed in this Python: pip install {package}, or "
                "leave it out"
            )
    for flag in FILES:
        path = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if path is not None and not Path(path).is_file():
            raise MkdNodeError(f"{flag} {path} is not a file: correct the path")
