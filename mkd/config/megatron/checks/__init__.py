"""Checks of Megatron's flags against each other and the model, which megatron itself makes late, unclearly or never.

Each file has one theme. The lists of checks, in the order of a job, are `mkd.config.megatron_args.ARGUMENT_CHECKS` and
`mkd.job.checks.CHECKS`.
"""
