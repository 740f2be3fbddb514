"""Sparse teachers: a few columns per token, the rest in one bucket."""
