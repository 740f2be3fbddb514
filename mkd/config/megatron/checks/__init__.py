"""Checks of Megatron's flags against each other and the model, which megatron itself makes late, unclearly or never.

Each file has one theme. The lists of checks, in the order of a job, are `ARGUMENT_CHECKS` of
`mkd.config.megatron.arguments` and `CHECKS` of `mkd.job.checks`.
"""
