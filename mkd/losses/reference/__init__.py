"""Losses as their definitions: one rank, any float dtype, autograd. Every fast version is held to these."""

from mkd.losses.reference.dense import *  # noqa: F403
