"""Checks of the --kd-* flags against each other; none of them reads a file.

Each file has one theme. The list of checks, in the order of a job, is `FIELD_CHECKS` of `mkd.config.kd_config`.
"""
