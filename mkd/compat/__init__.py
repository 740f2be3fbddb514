"""Every patch of Megatron: one file per subject, each patch with its upstream reason, and in tests/unit/compat/ a test
that fails when upstream no longer needs it. `mkd.compat.install` installs them all, and fixes their order.
"""
