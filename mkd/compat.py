"""Every patch of, and workaround for, megatron: each with its upstream reason and a test that fails when it is no longer
needed (tests/unit/test_compat.py).
"""


def use_prebuilt_dataset_helpers() -> None:
    """Let `initialize_megatron` use the compiled dataset helpers that the wheel ships.

    megatron-core 0.19 calls `make` in the installed datasets folder at every start; the wheel has the compiled module but
    no Makefile, so rank 0 exits with status 1.
    """
    from megatron.core.datasets import utils

    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return  # a source checkout: let megatron compile
    utils.compile_helpers = lambda: None
