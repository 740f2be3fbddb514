"""Losses between models with different tokenizers."""
