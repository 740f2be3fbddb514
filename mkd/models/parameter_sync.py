"""Parameters that the data-parallel wrapper still gathers (`--overlap-param-gather`)."""

from collections.abc import Sequence

from torch import nn


def finish_parameter_sync(module: nn.Module) -> None:
    """Wait until a module's own parameters are gathered, for code that uses them without calling the module.
    tests/dist/test_parameter_sync.py finds such code.

    With `--overlap-param-gather` the data-parallel wrapper gathers updated parameters during the forward pass, and
    waits for those of a module in that module's forward-pre-hook. Without the hook, `module.weight` may still hold the
    weights of the previous step.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def gather_parameters(chunks: Sequence[nn.Module]) -> None:
    """Gather all updated parameters now, for forward passes outside the training step. Collective over the
    data-parallel ranks.

    With `--overlap-param-gather` the next forward pass would gather them bucket by bucket.
    """
    for chunk in chunks:
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            chunk.start_param_sync(force_sync=True)
