"""Rollouts: texts that the student writes on the training ranks, with the training weights."""
